// The stages of a Tokenizer, from the search for added tokens to the decoder. build.cpp makes them from a
// TokenizerSpec, and tokenizer.cpp applies them. Private to the tokenizer.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/model.hpp"
#include "text/tokenizer/spec.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "text/tokenizer/vocabulary.hpp"

namespace capstan::text {

// XXH3-128, 32 hexadecimal digits.
std::string hash_text(std::string_view content);

struct Tokenizer::Pipeline {
  Vocabulary vocabulary{0};
  std::vector<AddedToken> added;
  // Tokens found in the text as given, and in the normalized text.
  TokenFinder plain, normalized;
  // Normalized forms of added tokens, by id, where they differ from the token.
  std::map<int32_t, std::string> normalized_texts;
  std::unique_ptr<const Model> model;

  // The model merges bytes: normalizer and pre_tokenizer replace the steps.
  bool fast = false;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  TextSteps normalizers, splits;
  // Some step depends on where in the text a piece begins.
  bool track_origin = false;

  std::vector<PostStep> post;
  // The tokens that all steps of `post` add before and after a text.
  std::vector<int32_t> before, after;
  Decoder decoder;
  // The bytes of a text are the concatenated bytes of its tokens.
  bool plain_decoder = false;
  // The bytes of each token by id; views into `arena`, which does not change after build().
  std::vector<std::string_view> bytes;
  std::string arena;
  std::vector<bool> special;
  std::optional<int32_t> bos, eos, unk, pad, eod;
  std::vector<TokenizerFile> files;

  // The working memory of one call of encode().
  struct Scratch {
    PreTokenizer::Scratch pieces;
    std::unique_ptr<Model::Scratch> model;
    std::string normalized;
    std::vector<std::string_view> batch;
  };
  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;

  std::unique_ptr<Scratch> take();
  void put_back(std::unique_ptr<Scratch> scratch);

  // The text split and changed by all steps before the model.
  TextPieces prepare(std::string_view text, bool track, const EncodeOptions& options) const;
  void encode_fast(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                   const EncodeOptions& options) const;
  void encode_steps(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                    const EncodeOptions& options) const;
  std::string run_decoder(std::span<const int32_t> ids, bool skip_special, bool raw) const;
  // The decoder's input for a token: its text, or the normalized form of an added token that is searched in
  // the normalized text.
  std::string_view text_to_decode(int32_t id) const;

  // Throws an error that describes a problem of the files.
  void build(const TokenizerSpec& spec);

 private:
  void add_vocabulary(const TokenizerSpec& spec);
  void add_bpe(const TokenizerSpec& spec);
  void add_unigram(const TokenizerSpec& spec);
  void add_word_piece(const TokenizerSpec& spec);
  void add_texts();
  void add_finders();
  void add_post(const TokenizerSpec& spec);
  [[noreturn]] static void fail_unknown(const TokenizerSpec& spec);
  std::array<int32_t, 256> fallback_ids() const;
};

}  // namespace capstan::text

// What a Tokenizer consists of. build.cpp makes it from a TokenizerSpec, tokenizer.cpp uses it. Private to
// the tokenizer.
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

std::string hash_text(std::string_view content);  // XXH3-128, 32 hexadecimal digits

struct Tokenizer::Parts {
  Vocabulary vocabulary{0};
  std::vector<AddedToken> added;
  TokenFinder plain, normalized;  // tokens found in the text as given, and in the normalized text
  // By id: the normalized form of added tokens that have another.
  std::map<int32_t, std::string> normalized_texts;
  std::unique_ptr<const Model> model;

  // Bytes are merged: normalizer and pre_tokenizer say the same as the steps.
  bool fast = false;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  TextSteps normalizers, splits;
  bool track_origin = false;  // a step asks where in the text a piece begins

  std::vector<PostStep> post;
  std::vector<int32_t> before, after;  // what all of its steps add
  Decoder decoder;
  bool plain_decoder = false;           // a text's bytes are those of its tokens, one after the other
  std::vector<std::string_view> bytes;  // by id; into arena, which does not move any more
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
  void give(std::unique_ptr<Scratch> scratch);

  // The text split and changed by all steps before the model.
  TextPieces prepare(std::string_view text, bool track, const EncodeOptions& options) const;
  void encode_fast(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                   const EncodeOptions& options) const;
  void encode_steps(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                    const EncodeOptions& options) const;
  std::string run_decoder(std::span<const int32_t> ids, bool skip_special, bool raw) const;
  // What the decoder is given for a token: its text, of an added token that is looked for in the normalized
  // text the normalized form.
  std::string_view text_to_decode(int32_t id) const;

  // Throws what is wrong with the files.
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

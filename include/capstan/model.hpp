// A trained model: generation, logits, and the loss of a text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capstan/error.hpp"

namespace capstan {

struct LoadOptions {
  // Overrides of the recipe that the model carries, such as "train.threads=1" (threads of this model) or
  // "mixed_precision=fp32" (type of its computations).
  std::vector<std::string> overrides;
  // LoRA or DoRA adapters to put beside the weights: a directory of PEFT, or a checkpoint or run with `peft`.
  // Empty: none but those that a checkpoint holds itself.
  std::string adapter;
};

struct GenerateOptions {
  // New tokens; the model's context may allow fewer.
  int64_t max_tokens = 100;
  // Sampling temperature. 0: always the most likely token.
  double temperature = 1.0;
  // Samples from the k most likely tokens. 0: from all.
  int64_t top_k = 0;
  // Samples from the most likely tokens whose probabilities add up to p, in (0, 1].
  double top_p = 1.0;
  // The same seed, prompt, options and model give the same tokens.
  uint64_t seed = 1234;
  // Ends at an end-of-document or end-of-turn token.
  bool stop_at_eod = true;
  // The prompt is a user's message; the model's chat template is applied. Text prompts only.
  bool chat = false;
  // System message of the chat; empty: none.
  std::string system;
  // Called with each new token and the UTF-8 text that it completes, which may be empty. False ends the
  // generation. Text that is still incomplete at the end comes in one more call with id -1, whose answer is
  // ignored. An exception ends the generation and is passed on.
  std::function<bool(int32_t id, const std::string& text)> on_token;
};

struct Generated {
  // The generated text without the prompt, as UTF-8. Empty without a tokenizer.
  std::string text;
  // New tokens, the one that ended the text included.
  std::vector<int32_t> ids;
  int64_t prompt_tokens = 0;
  // The generation ended at an end-of-document or end-of-turn token.
  bool ended = false;
  // on_token ended the generation.
  bool stopped = false;
  // Time to process the prompt, and time to generate.
  double prompt_seconds = 0, seconds = 0;
};

struct TextLoss {
  // Mean negative log-likelihood of a token, in nats.
  double loss = 0;
  double perplexity = 0;
  // Negative log-likelihood in bits, divided by the number of bytes of the text.
  double bits_per_byte = 0;
  // Predicted tokens: all but the first.
  int64_t tokens = 0;
};

// The full model in this process. A copy refers to the same model. One call at a time on a model and its
// copies; the calls may come from different threads. Failed calls leave the model usable.
class Model {
 public:
  // name: a checkpoint, a directory of checkpoints, or a run (which stands for its newest checkpoint that
  // verifies), a model of another program as `hf:DIR` (Hugging Face directory) or `gguf:FILE`.
  // Files of a checkpoint are verified against their hashes. Files of other programs have none; their
  // structure and sizes are checked. Throws Error: not_found; format (also for a recipe that no longer
  // resolves); io; config (an override); usage (adapters beside a checkpoint that holds its own); failed
  // (adapters of other weights); unsupported; no_fit.
  static Model load(const std::string& name, const LoadOptions& options = {});

  // Newer checkpoints of the run that were passed over because they do not verify, with the reasons.
  const std::vector<std::string>& warnings() const;
  // Number of tokens in the vocabulary, and length of one row of logits.
  int64_t vocab_size() const;
  // Maximum number of tokens of prompt and new tokens together.
  int64_t context_length() const;
  bool has_tokenizer() const;

  // The token ids of a text, beginning with what the tokenizer puts before a text (<bos>). Special tokens in
  // the text are recognized. Throws Error: unsupported without a tokenizer.
  std::vector<int32_t> encode(std::string_view text) const;
  // The text of token ids as valid UTF-8, without special tokens. Throws Error: unsupported without a
  // tokenizer.
  std::string decode(std::span<const int32_t> ids) const;

  // Logits of the token that follows each position: fp32 [ids.size(), vocab_size()], row-major, natural
  // scale. Throws Error: usage for no tokens, ids outside of the vocabulary, and more tokens than
  // context_length().
  std::vector<float> logits(std::span<const int32_t> ids);
  // The same for several sequences of any lengths, computed together: one result for each.
  std::vector<std::vector<float>> logits_batch(const std::vector<std::vector<int32_t>>& sequences);

  // An empty text begins a document. Throws Error: usage for options out of range and for a prompt that fills
  // the context, unsupported without a tokenizer.
  Generated generate(const std::string& prompt, const GenerateOptions& options = {});
  // Generates from token ids, which are used unchanged; needs no tokenizer. Throws Error: usage, also for ids
  // outside of the vocabulary and for no ids.
  Generated generate(std::span<const int32_t> prompt, const GenerateOptions& options = {});
  // Calls generate() for each prompt, one after the other, in the time of as many calls: the cache of keys
  // and values has one length for all its sequences. One result for each prompt, in order; on_token sees one
  // prompt after the other, and ends the current prompt's generation only.
  std::vector<Generated> generate_batch(const std::vector<std::string>& prompts,
                                        const GenerateOptions& options = {});
  std::vector<Generated> generate_batch_from_ids(const std::vector<std::vector<int32_t>>& prompts,
                                                 const GenerateOptions& options = {});

  // Computes the loss of a text in windows of the model's sequence length that move on by `stride` tokens.
  // With stride 0 they move on by their length and do not overlap. Throws Error: usage for a text of fewer
  // than two tokens or a negative stride, unsupported without a tokenizer.
  TextLoss loss(const std::string& text, int64_t stride = 0);

 private:
  struct Impl;
  explicit Model(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace capstan

// A trained model: text from it, and the loss of a text under it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capstan/error.hpp"

namespace capstan {

struct GenerateOptions {
  int64_t max_tokens = 100;  // new ones; the model's positions may allow fewer
  double temperature = 1.0;  // 0: always the likeliest token
  int64_t top_k = 0;         // only the k likeliest; 0: all
  double top_p = 1.0;        // only the likeliest whose probabilities add up to p, in (0, 1]
  uint64_t seed = 1234;      // the same seed, prompt, options and checkpoint give the same text
  bool stop_at_eod = true;   // end with the document
};

struct Generated {
  std::string text;  // without the prompt; UTF-8
  int64_t prompt_tokens = 0, tokens = 0;
  bool ended = false;                      // by the end-of-document token
  double prompt_seconds = 0, seconds = 0;  // reading the prompt; writing the rest
};

struct TextLoss {
  double loss = 0;  // mean negative log-likelihood of a token, in nats
  double perplexity = 0;
  double bits_per_byte = 0;  // of the text
  int64_t tokens = 0;        // predicted: all but the first
};

// On one process; a program of several ranks may hold one on each. A copy is the same model. One call at a time.
class Model {
 public:
  // path:      a checkpoint, a directory of checkpoints, or a run, which stands for its newest checkpoint that verifies.
  // overrides: of the recipe that the checkpoint carries, such as "train.threads=1".
  // Every file is verified. Throws Error: not_found, format (which also names a recipe that no longer resolves), io, config
  // (an override), unsupported, no_fit.
  static Model load(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

  // on_text gets complete UTF-8 as soon as it is there; it may be empty, and what it throws ends the text and is
  // passed on. An empty prompt begins a document. Throws Error: usage for options out of range and for a prompt that
  // fills the model's positions, unsupported without a tokenizer.
  Generated generate(const std::string& prompt, const GenerateOptions& options = {},
                     const std::function<void(const std::string& text)>& on_text = {});

  // Windows of the model's sequence length move on by `stride` tokens; 0: by their length, so that they do not
  // overlap. Throws Error: usage for a text of fewer than two tokens or a negative stride, unsupported without a
  // tokenizer.
  TextLoss loss(const std::string& text, int64_t stride = 0);

 private:
  struct Impl;
  explicit Model(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace capstan

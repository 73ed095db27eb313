// Loss of a text under a checkpoint, in total or token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace capstan::train {

class LoadedModel;

struct EvalOptions {
  // The text to evaluate, as UTF-8.
  std::string text;
  // Adds the tokens that the tokenizer puts before a text (<bos>), once, at its beginning; not predicted.
  bool add_front = true;
  // Tokens by which windows of model.seq_length move on: each token is predicted from the at least seq_length
  // - stride before it. 0: seq_length, windows do not overlap (but for one token) and every token is computed
  // once.
  int64_t stride = 0;
  // Called for each predicted token, in order: its id and its natural-logarithm probability. May be empty.
  std::function<void(int32_t id, double logprob)> per_token;
};
struct EvalResult {
  // Mean negative log-likelihood in nats.
  double loss = 0;
  // exp(loss).
  double perplexity = 0;
  // Predicted tokens: all but the first.
  int64_t tokens = 0;
  // Negative log-likelihood in bits, divided by the number of bytes of the text.
  double bits_per_byte = 0;
};

// Throws ErrorCode::failed for a model that has computed NaN or an infinite value: "its loss is nan".
[[noreturn]] void refuse_values(const std::string& values);

// Every rank that holds a part of the model calls it with the same options (but for per_token) and has the
// same result. ErrorCode::usage for a text of fewer than two tokens, ::unsupported without a tokenizer.
EvalResult evaluate_text(LoadedModel& model, const EvalOptions& options);

}  // namespace capstan::train

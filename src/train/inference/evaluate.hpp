// The loss of a checkpoint on a text, in total or token by token.
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
  // Tokens between the beginnings of two windows of model.seq_length tokens. Each token is predicted from at
  // least seq_length - stride tokens before it. 0: seq_length, so that windows overlap by one token only.
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

// Throws ErrorCode::failed: the model has computed NaN or an infinite value. values: "loss is nan".
[[noreturn]] void refuse_values(const std::string& values);

// Collective over the ranks that hold a part of the model: all pass the same options (except per_token) and
// get the same result. ErrorCode::usage for a text of fewer than two tokens, ::unsupported without a
// tokenizer.
EvalResult evaluate_text(LoadedModel& model, const EvalOptions& options);

}  // namespace capstan::train

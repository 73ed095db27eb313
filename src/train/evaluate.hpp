// Loss of a text under a checkpoint, in total or token by token.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "config/config.hpp"
#include "data/tokenizer/tokenizer.hpp"
#include "train/progress.hpp"

namespace capstan::train {

// A checkpoint made ready for evaluation and generation: its recipe's model, its tokenizer, its weights. Evaluation and
// generation need no optimizer and no gradients.
class LoadedModel;

struct EvalOptions {
  std::string text;       // UTF-8
  // Called for each predicted token, in order: its id and its natural-logarithm probability. May be empty.
  std::function<void(int32_t id, double logprob)> per_token;
};
struct EvalResult {
  double loss = 0;         // mean negative log-likelihood in nats
  double perplexity = 0;   // exp(loss)
  int64_t tokens = 0;      // predicted tokens: all but the first
  double bits_per_byte = 0;
};

std::shared_ptr<LoadedModel> load_model(const std::filesystem::path& checkpoint, const config::Config& config, int64_t threads);
EvalResult evaluate_text(LoadedModel& model, const EvalOptions& options);

struct GenerateOptions {
  std::string prompt;
  int64_t max_tokens = 100;
  double temperature = 1.0;  // 0: the likeliest token
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  uint64_t seed = 1234;
  bool stop_at_eod = true;
  std::function<void(const std::string& text)> on_text;  // complete UTF-8, as soon as it is there
};
struct GenerateResult {
  int64_t prompt_tokens = 0, tokens = 0;
  bool ended = false;  // by the end-of-document token
  double seconds = 0;  // after the prompt
};
GenerateResult generate(LoadedModel& model, const GenerateOptions& options);

}  // namespace capstan::train

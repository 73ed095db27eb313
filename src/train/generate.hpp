// Text from a checkpoint: one token after the other with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace capstan::train {

class LoadedModel;  // loaded_model.hpp

struct GenerateOptions {
  std::string prompt;        // empty: begins with the end-of-document token
  int64_t max_tokens = 100;  // new ones
  double temperature = 1.0;  // 0: always the likeliest token
  int64_t top_k = 0;         // only the k likeliest; 0: all
  double top_p = 1.0;        // only the likeliest whose probabilities add up to p
  uint64_t seed = 1234;      // the same seed, prompt and checkpoint give the same text
  bool stop_at_eod = true;
  std::function<void(const std::string& text)> on_text;  // complete UTF-8, as soon as it is there
};
struct GenerateResult {
  int64_t prompt_tokens = 0, tokens = 0;
  bool ended = false;                      // by the end-of-document token
  double prompt_seconds = 0, seconds = 0;  // reading the prompt; writing the rest
};

// Every rank that holds a part of the model calls it with the same options (but for on_text) and draws the same tokens.
// ErrorCode::usage for options out of range and for a prompt that leaves no room in the model's positions.
GenerateResult generate(LoadedModel& model, const GenerateOptions& options);

// One draw from logits [vocab] (natural scale), as generate() makes it: word `position` of the sampling stream of `seed`.
int32_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position);

}  // namespace capstan::train

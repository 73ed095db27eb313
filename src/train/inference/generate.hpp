// Text from a checkpoint: one token after the other with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace capstan::train {

class LoadedModel;  // loaded_model.hpp

struct GenerateOptions {
  // Empty: begins with what the tokenizer puts before a text, else with the end-of-document token.
  std::string prompt;
  // Token ids in place of `prompt`, taken as they are: nothing is put before them, and no tokenizer is
  // needed. Empty: the text counts.
  std::vector<int32_t> prompt_ids;
  // The prompt is a user's message, by the model's chat template (chat_template_of()), after a system message
  // where there is one.
  bool chat = false;
  std::string system;
  // What the tokenizer puts before a text: <bos>; a chat template says that itself.
  bool add_front = true;
  int64_t max_tokens = 100;  // new ones
  double temperature = 1.0;  // 0: always the likeliest token
  int64_t top_k = 0;         // only the k likeliest; 0: all
  double top_p = 1.0;        // only the likeliest whose probabilities add up to p
  uint64_t seed = 1234;      // the same seed, prompt and checkpoint give the same text
  // At the end of document, the tokenizer's eos_token and those that the model's generation settings name; in
  // a chat also at what the template puts behind an answer.
  bool stop_at_eod = true;
  std::function<void(const std::string& text)> on_text;  // complete UTF-8, as soon as it is there
  // Called with each new token, after the text that it completes. False ends the generation; every rank must
  // give the same answer.
  std::function<bool(int32_t id)> on_token;
};
struct GenerateResult {
  int64_t prompt_tokens = 0, tokens = 0;
  std::vector<int32_t> ids;  // the new tokens, the one that ended the text included
  bool stopped = false;      // by on_token
  bool ended = false;        // at one of those
  // The model's positions (context_limit) were used up before max_tokens.
  bool context_full = false;
  int64_t context_limit = 0;               // prompt and answer together
  const char* context_field = "";          // that sets it
  double prompt_seconds = 0, seconds = 0;  // reading the prompt; writing the rest
};

// Every rank that holds a part of the model calls it with the same options (but for on_text) and draws the
// same tokens. ErrorCode::unsupported for a text without a tokenizer; ::usage for options out of range, for
// token ids outside of the model's vocabulary, for a prompt that leaves no space in the model's positions and
// for a chat without a template; ::format where the template refuses it.
GenerateResult generate(LoadedModel& model, const GenerateOptions& options);

// One draw from logits [vocab] (natural scale), as generate() makes it: word `position` of the random
// sequence of `seed`.
int32_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position);

}  // namespace capstan::train

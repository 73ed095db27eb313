// Generates text with a checkpoint, token by token, with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace capstan::train {

class LoadedModel;

struct GenerateOptions {
  // Empty: the text begins with the tokens that the tokenizer puts before a text, else with the
  // end-of-document token.
  std::string prompt;
  // Token ids instead of `prompt`, used unchanged: nothing is put before them, and no tokenizer is
  // needed. Empty: `prompt` is used.
  std::vector<int32_t> prompt_ids;
  // The prompt is a user's message, by the model's chat template (chat_template_of()), after a system message
  // where there is one.
  bool chat = false;
  std::string system;
  // Adds the tokens that the tokenizer puts before a text (<bos>); a chat template writes them itself.
  bool add_front = true;
  // Maximum number of new tokens.
  int64_t max_tokens = 100;
  // Sampling temperature. 0: always the most likely token.
  double temperature = 1.0;
  // Samples from the k most likely tokens. 0: from all.
  int64_t top_k = 0;
  // Samples from the most likely tokens whose probabilities add up to p.
  double top_p = 1.0;
  // The same seed, prompt and checkpoint give the same text.
  uint64_t seed = 1234;
  // Ends at the end-of-document token, at the tokenizer's eos_token and at the end tokens of the model's
  // generation settings. In a chat, it also ends at the token that the template puts after an answer.
  bool stop_at_eod = true;
  // Called with each piece of text as soon as it is complete UTF-8.
  std::function<void(const std::string& text)> on_text;
  // Called with each new token, after the text that it completes. False ends the generation; every rank must
  // give the same answer.
  std::function<bool(int32_t id)> on_token;
};
struct GenerateResult {
  int64_t prompt_tokens = 0, tokens = 0;
  // The new tokens, the one that ended the text included.
  std::vector<int32_t> ids;
  // on_token ended the generation.
  bool stopped = false;
  // An end token ended the generation.
  bool ended = false;
  // The model's positions (context_limit) were used up before max_tokens.
  bool context_full = false;
  // Maximum number of tokens of prompt and answer together.
  int64_t context_limit = 0;
  // The field that sets context_limit.
  const char* context_field = "";
  // Time to process the prompt, and time to generate.
  double prompt_seconds = 0, seconds = 0;
};

// Collective over the ranks that hold a part of the model: all pass the same options (except on_text) and
// draw the same tokens. ErrorCode::unsupported for a text without a tokenizer; ::usage for options out of
// range, for token ids outside of the model's vocabulary, for a prompt that uses up the model's positions and
// for a chat without a template; ::format if the template refuses the chat.
GenerateResult generate(LoadedModel& model, const GenerateOptions& options);

}  // namespace capstan::train

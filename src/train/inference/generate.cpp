#include "train/inference/generate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "data/chat_prompt.hpp"
#include "train/inference/evaluate.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

namespace {

struct PromptTokens {
  std::vector<int32_t> ids;
  std::set<int32_t> ends;
  // Text that ends the generation, as the tokens do.
  std::string end_text;
};

void check(const GenerateOptions& options, int64_t vocabulary) {
  if (options.max_tokens < 0)
    fail(ErrorCode::usage, "the number of new tokens is negative: " + std::to_string(options.max_tokens));
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    fail(ErrorCode::usage,
         "the temperature " + to_text(options.temperature) + " must be finite and at least 0");
  if (!(options.top_p > 0 && options.top_p <= 1))
    fail(ErrorCode::usage, "top-p " + to_text(options.top_p) + " is not in (0, 1]");
  if (options.top_k < 0) fail(ErrorCode::usage, "top-k " + std::to_string(options.top_k) + " is negative");
  for (const int32_t id : options.prompt_ids)
    if (id < 0 || id >= vocabulary)
      fail(ErrorCode::usage, "the prompt has token id " + std::to_string(id) + ", the model " +
                                 std::to_string(vocabulary) + " tokens (model.vocab_size)");
}

PromptTokens prompt_tokens_of(const LoadedModel& model, const GenerateOptions& options) {
  if (!options.prompt_ids.empty() && !model.tokenizer())
    return {options.prompt_ids, {model.end_tokens().begin(), model.end_tokens().end()}, {}};
  const text::Tokenizer& tokenizer = model.require_tokenizer();
  const auto eod = end_of_document(model.config(), tokenizer);
  PromptTokens result;
  result.ends.insert(model.end_tokens().begin(), model.end_tokens().end());
  for (const auto& id : {eod, tokenizer.eos()})
    if (id) result.ends.insert(*id);
  if (!options.prompt_ids.empty()) {
    result.ids = options.prompt_ids;
  } else if (options.chat) {
    const auto chat_template = chat_template_of(model.config(), tokenizer);
    if (!chat_template)
      fail(ErrorCode::usage, "a chat needs a chat template, and the model comes without one",
           "tokenizer.chat_template=chatml, another known template, or a .jinja file: the one that it was "
           "trained with");
    data::ChatPrompt chat = data::chat_prompt(tokenizer, *chat_template, eod, options.system, options.prompt);
    result.ids = std::move(chat.ids);
    if (chat.end_token) result.ends.insert(*chat.end_token);
    result.end_text = std::move(chat.end_text);
  } else {
    if (options.add_front) result.ids = tokenizer.before();
    tokenizer.encode(options.prompt, result.ids);
  }
  if (!result.ids.empty()) return result;
  if (!eod)
    fail(ErrorCode::usage, "the prompt is empty and the tokenizer has no end-of-document token to begin with",
         "give a prompt");
  result.ids.push_back(*eod);
  return result;
}

// Emits text up to the stop text; text that may begin the stop text is held back.
class TextOutput {
 public:
  TextOutput(const GenerateOptions& options, std::string end) : options_(options), end_(std::move(end)) {}

  bool ended() const { return ended_; }
  void push(const std::string& text) {
    if (ended_) return;
    waiting_ += text;
    size_t ready = waiting_.size();
    if (!end_.empty()) {
      const size_t found = waiting_.find(end_);
      ended_ = found != std::string::npos;
      if (ended_)
        ready = found;
      else
        for (ready -= std::min(ready, end_.size() - 1); !end_.starts_with(waiting_.substr(ready)); ++ready) {
        }
    }
    emit(ready);
  }
  void finish() {
    if (!ended_) emit(waiting_.size());
  }

 private:
  void emit(size_t bytes) {
    if (options_.on_text && bytes > 0) options_.on_text(waiting_.substr(0, bytes));
    waiting_.erase(0, bytes);
  }
  const GenerateOptions& options_;
  std::string end_, waiting_;
  bool ended_ = false;
};

}  // namespace

GenerateResult generate(LoadedModel& model, const GenerateOptions& options) {
  check(options, model.config().model.vocab_size);
  PromptTokens start = prompt_tokens_of(model, options);
  if (!options.stop_at_eod) start.ends.clear(), start.end_text.clear();
  const std::vector<int32_t>& prompt = start.ids;
  const auto& m = model.config().model;
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t positions = m.max_position_embeddings.value_or(m.seq_length);
  const char* const limit = m.max_position_embeddings ? "model.max_position_embeddings" : "model.seq_length";
  if (prompt_tokens >= positions)
    fail(ErrorCode::usage, "the prompt has " + std::to_string(prompt_tokens) + " tokens, the model " +
                               std::to_string(positions) + " positions (" + limit + ")");
  const int64_t wanted = std::min(options.max_tokens, positions - prompt_tokens);
  // The prompt and the generated tokens.
  std::vector<int32_t> tokens = prompt;

  GenerateResult result;
  result.prompt_tokens = prompt_tokens;
  result.context_limit = positions;
  result.context_field = limit;
  auto cache = model.make_cache(prompt_tokens + wanted);
  using Clock = std::chrono::steady_clock;
  std::optional<text::IncrementalDecoder> decoder;
  if (model.tokenizer()) decoder.emplace(model.tokenizer(), true);
  // SentencePiece's decoder takes the blank off the first token of a text. A continuation does not begin one;
  // an answer does.
  if (decoder && !options.chat)
    for (const int32_t id : prompt) decoder->push(id);
  TextOutput output(options, start.end_text);
  const auto begin = Clock::now();
  const kernels::SamplingOptions sampling{options.temperature, options.top_k, options.top_p, options.seed};
  // The next token, on the device: each step reads it there, and the host only to look at it.
  Tensor next = model.next_token(model.upload_ids(prompt), cache, sampling);
  int32_t id = next.to_host<int32_t>()[0];
  result.prompt_seconds = seconds_since(begin);
  const auto after_prompt = Clock::now();
  for (int64_t i = 0; i < wanted; ++i) {
    if (id < 0) refuse_values("logits are not finite");
    ++result.tokens;
    result.ids.push_back(id);
    result.ended = start.ends.count(id) > 0;
    if (!result.ended && decoder) {
      output.push(decoder->push(id));
      result.ended = output.ended();
    }
    result.stopped = options.on_token && !options.on_token(id) && !result.ended;
    if (result.ended || result.stopped) break;
    if (i + 1 == wanted) continue;
    tokens.push_back(id);
    if (cache.past < cache.valid_length) {
      next = model.next_token(next, cache, sampling);
    } else {
      // LongRoPE's factors change here; Transformers too computes the keys again.
      cache = model.make_cache(prompt_tokens + wanted);
      next = model.next_token(model.upload_ids(tokens), cache, sampling);
    }
    id = next.to_host<int32_t>()[0];
  }
  result.context_full = !result.ended && !result.stopped && wanted < options.max_tokens;
  if (decoder) output.push(decoder->finish());
  output.finish();
  result.seconds = seconds_since(after_prompt);
  return result;
}

}  // namespace capstan::train

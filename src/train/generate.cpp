#include "train/generate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "base/text.hpp"
#include "train/loaded_model.hpp"
#include "train/timers.hpp"

namespace capstan::train {

int32_t sample(std::span<const float> logits, const GenerateOptions& options, int64_t position) {
  if (options.temperature <= 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  // Likeliest first, equal ones by id: what top-k and top-p keep does not depend on the sort's mood.
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;
  };
  const size_t kept =
      options.top_k > 0 ? std::min(order.size(), static_cast<size_t>(options.top_k)) : order.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), likelier);
  order.resize(kept);
  std::vector<double> weights(kept);
  const double top = static_cast<double>(logits[static_cast<size_t>(order[0])]);
  double total = 0;
  for (size_t i = 0; i < kept; ++i)
    total += weights[i] =
        std::exp((static_cast<double>(logits[static_cast<size_t>(order[i])]) - top) / options.temperature);
  size_t count = kept;
  if (options.top_p < 1.0) {
    double sum = 0;
    for (count = 0; count < kept && sum < options.top_p * total; ++count) sum += weights[count];
    total = sum;
  }
  PhiloxStream random(philox_key(options.seed, purpose::sampling, static_cast<uint64_t>(position)));
  double threshold = random.uniform() * total;
  for (size_t i = 0; i < count; ++i) {
    threshold -= weights[i];
    if (threshold < 0) return order[i];
  }
  return order[count - 1];
}

GenerateResult generate(LoadedModel& model, const GenerateOptions& options) {
  if (!model.tokenizer())
    fail(ErrorCode::unsupported, "the checkpoint has no tokenizer: text cannot be turned into ids");
  if (options.max_tokens < 0)
    fail(ErrorCode::usage, "--max-tokens " + std::to_string(options.max_tokens) + " is negative");
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    fail(ErrorCode::usage, "--temperature " + to_text(options.temperature) + " is not a number from 0");
  if (!(options.top_p > 0 && options.top_p <= 1))
    fail(ErrorCode::usage, "--top-p " + to_text(options.top_p) + " is not in (0, 1]");
  if (options.top_k < 0) fail(ErrorCode::usage, "--top-k " + std::to_string(options.top_k) + " is negative");
  const data::Tokenizer& tokenizer = *model.tokenizer();
  auto eod = tokenizer.id_of(model.config().tokenizer.eod_token);
  if (!eod) eod = tokenizer.eod();
  std::vector<int32_t> prompt = tokenizer.encode(options.prompt);
  if (prompt.empty()) {
    if (!eod)
      fail(ErrorCode::usage,
           "the prompt is empty and the tokenizer has no end-of-document token to begin with",
           "--prompt TEXT");
    prompt.push_back(*eod);
  }
  const auto& m = model.config().model;
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t positions = m.max_position_embeddings.value_or(m.seq_length);
  if (prompt_tokens >= positions)
    fail(ErrorCode::usage, "the prompt has " + std::to_string(prompt_tokens) + " tokens, the model " +
                               std::to_string(positions) + " positions");
  const int64_t wanted = std::min(options.max_tokens, positions - prompt_tokens);
  std::vector<int32_t> tokens = prompt;  // with those that were drawn

  GenerateResult result;
  result.prompt_tokens = prompt_tokens;
  auto cache = model.make_cache(prompt_tokens + wanted);
  using Clock = std::chrono::steady_clock;
  data::StreamDecoder decoder(model.tokenizer(), true);
  const auto say = [&](const std::string& text) {
    if (options.on_text && !text.empty()) options.on_text(text);
  };
  const auto begin = Clock::now();
  std::vector<float> logits = model.next_logits(prompt, cache);
  result.prompt_seconds = seconds_since(begin);
  const auto after_prompt = Clock::now();
  for (int64_t i = 0; i < wanted; ++i) {
    // Only ids that the tokenizer can produce: the model's vocabulary may be larger.
    const auto known = std::span<const float>(logits).first(
        std::min(logits.size(), static_cast<size_t>(tokenizer.vocab_size())));
    const int32_t id = sample(known, options, prompt_tokens + i);
    ++result.tokens;
    if (options.stop_at_eod && eod && id == *eod) {
      result.ended = true;
      break;
    }
    say(decoder.push(id));
    if (i + 1 == wanted) continue;
    tokens.push_back(id);
    if (cache.past < cache.holds_to) {
      logits = model.next_logits(std::span(&id, 1), cache);
    } else {  // as Transformers does where longrope's factors change
      cache = model.make_cache(prompt_tokens + wanted);
      logits = model.next_logits(tokens, cache);
    }
  }
  say(decoder.finish());
  result.seconds = seconds_since(after_prompt);
  return result;
}

}  // namespace capstan::train

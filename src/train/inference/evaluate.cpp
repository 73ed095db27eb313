#include "train/inference/evaluate.hpp"

#include <algorithm>
#include <cmath>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "train/inference/loaded_model.hpp"

namespace capstan::train {

void refuse_values(const std::string& values) {
  fail(ErrorCode::failed, "the model does not compute finite values: its " + values,
       "its weights or adapters contain NaN or infinity, or values that overflow their type");
}

static void require_number(double value, const char* what) {
  if (!std::isfinite(value)) refuse_values(std::string(what) + " is " + to_text(value));
}

EvalResult evaluate_text(LoadedModel& model, const EvalOptions& options) {
  const text::Tokenizer& tokenizer = model.require_tokenizer();
  std::vector<int32_t> ids;
  if (options.add_front) ids = tokenizer.before();
  tokenizer.encode(options.text, ids);
  if (ids.size() < 2)
    fail(ErrorCode::usage,
         "the text has " + std::to_string(ids.size()) + " tokens; at least two are needed to predict one");
  const int64_t window = model.config().model.seq_length, predictions = static_cast<int64_t>(ids.size()) - 1;
  const int64_t stride = options.stride > 0 ? std::min(options.stride, window) : window;

  // Window w predicts [w * stride, w * stride + stride) and sees what precedes within its `window` tokens.
  EvalResult result;
  double total = 0;
  constexpr int64_t kWindowsPerPass = 4;
  const int64_t windows = ceil_div(predictions, stride);
  for (int64_t first = 0; first < windows; first += kWindowsPerPass) {
    const int64_t rows = std::min(kWindowsPerPass, windows - first);
    data::MicroBatch batch = data::MicroBatch::zeros(rows, window);
    // Range of counted positions of each row: the first one, and the end.
    std::vector<std::pair<int64_t, int64_t>> counted;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = (first + row) * stride, end = std::min(predictions, begin + stride);
      const int64_t start = std::max<int64_t>(0, end - window);
      counted.emplace_back(begin - start, end - start);
      for (int64_t t = 0; t < window; ++t) {
        const auto at = static_cast<size_t>(row * window + t);
        batch.position_ids[at] = static_cast<int32_t>(t);
        if (start + t >= end) continue;
        batch.tokens[at] = ids[static_cast<size_t>(start + t)];
        batch.labels[at] = ids[static_cast<size_t>(start + t + 1)];
        batch.loss_mask[at] = t >= counted.back().first ? 1.0f : 0.0f;
      }
    }
    const std::vector<float> losses = model.token_losses(batch);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = counted[static_cast<size_t>(row)].first; t < counted[static_cast<size_t>(row)].second;
           ++t) {
        const auto at = static_cast<size_t>(row * window + t);
        total += static_cast<double>(losses[at]);
        ++result.tokens;
        if (options.per_token) options.per_token(batch.labels[at], -static_cast<double>(losses[at]));
      }
  }
  result.loss = total / static_cast<double>(result.tokens);
  require_number(result.loss, "loss");
  result.perplexity = std::exp(result.loss);
  result.bits_per_byte = total / std::log(2.0) / static_cast<double>(options.text.size());
  return result;
}

}  // namespace capstan::train

// Positions and sampling of generation.
#include "kernels/decoding.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "base/philox.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"

namespace capstan::kernels {

namespace {

void positions(Context& c, const int32_t* past, int64_t batch, int64_t tokens, int32_t* out) {
  parallel_blocks(c, batch * tokens, 16384, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) out[i] = *past + static_cast<int32_t>(i % tokens);
  });
}

void advance(Context&, int32_t* past, int64_t tokens) {
  *past += static_cast<int32_t>(tokens);
}

// Number of tokens of a row among which one is sampled. The workspace of a row holds their weights, then the
// ids of all columns.
int64_t candidates_of(const SamplingOptions& options, int64_t cols) {
  return options.top_k > 0 ? std::min(options.top_k, cols) : cols;
}
WorkspaceSize sample_workspace(SamplingOptions options, int64_t, int64_t cols) {
  if (options.temperature <= 0) return {};
  return {0, static_cast<size_t>(candidates_of(options, cols)) * sizeof(double) +
                 static_cast<size_t>(cols) * sizeof(int32_t)};
}

int32_t argmax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// weights, ids: memory for candidates_of() and for all columns.
int32_t sample_row(std::span<const float> logits, const SamplingOptions& options, PhiloxSequence random,
                   double* weights, int32_t* ids) {
  const auto cols = static_cast<int64_t>(logits.size()), kept = candidates_of(options, cols);
  const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
  std::iota(ids, ids + cols, 0);
  std::partial_sort(ids, ids + kept, ids + cols,
                    [&](int32_t a, int32_t b) { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; });
  const auto top = static_cast<double>(logit(ids[0]));
  double total = 0;
  for (int64_t i = 0; i < kept; ++i)
    total += weights[i] = std::exp((static_cast<double>(logit(ids[i])) - top) / options.temperature);
  int64_t count = kept;
  if (options.top_p < 1.0) {
    double sum = 0;
    for (count = 0; count < kept && sum < options.top_p * total; ++count) sum += weights[count];
    total = sum;
  }
  double threshold = random.uniform() * total;
  for (int64_t i = 0; i < count; ++i) {
    threshold -= weights[i];
    if (threshold < 0) return ids[i];
  }
  return ids[count - 1];
}

void sample(Context& c, SamplingOptions options, const float* logits, int64_t rows, int64_t cols,
            int64_t row_stride, const int32_t* position, int32_t* tokens) {
  const WorkspaceParts workspace(c, sample_workspace(options, rows, cols));
  if (!workspace) return;
  const PhiloxKey key = philox_key(options.seed, purpose::sampling, static_cast<uint64_t>(*position));
  parallel_blocks(c, rows, 1, [&](int64_t row, int64_t, int worker) {
    const std::span<const float> here(logits + row * row_stride, static_cast<size_t>(cols));
    if (!std::isfinite(std::accumulate(here.begin(), here.end(), 0.0))) {
      tokens[row] = -1;
    } else if (options.temperature <= 0) {
      tokens[row] = argmax(here);
    } else {
      auto* weights = workspace.worker<double>(worker);
      auto* ids = reinterpret_cast<int32_t*>(weights + candidates_of(options, cols));
      tokens[row] = sample_row(here, options, PhiloxSequence(key, static_cast<uint64_t>(row)), weights, ids);
    }
  });
}

}  // namespace

const Decoding& cpu_decoding() {
  static const Decoding family{
      .positions = positions, .advance = advance, .sample = sample, .sample_workspace = sample_workspace};
  return family;
}

}  // namespace capstan::kernels

#include "data/dataset.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace capstan::data {

int64_t Dataset::samples_in(double epochs) const {
  // Subtracts a small tolerance, so that rounding errors do not add a row to 3 passes.
  const double samples = epochs * static_cast<double>(epoch_samples()) * (1 - 1e-12);
  if (!(samples < 4e18)) fail(ErrorCode::config, "train.epochs is more than 2^62 samples");
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(samples)));
}

std::optional<Passes> most_passes(const Dataset& dataset, int64_t samples) {
  std::optional<Passes> most;
  for (const DatasetShare& part : dataset.parts()) {
    if (part.epoch_samples == SampleSource::kEndless) continue;
    const double count = static_cast<double>(samples) * part.share /
                         static_cast<double>(std::max<int64_t>(1, part.epoch_samples));
    if (!most || count > most->count) most = Passes{part, count};
  }
  return most;
}

}  // namespace capstan::data

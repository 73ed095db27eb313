#include "train/inference/compare.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

#include "base/error.hpp"
#include "checkpoint/store.hpp"
#include "config/resolve/resolve.hpp"
#include "config/tools/show.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_list.hpp"

namespace capstan::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kNumbers[] = {"loss", "grad_norm", "learning_rate", "consumed_samples"};

// Loss and gradient norm of the step itself where both rows have them: the means depend on the logging
// interval.
std::pair<double, double> values_of(const records::ReadRow& a, const records::ReadRow& b, const char* name) {
  const std::string own = std::string("step_") + name;
  const double x = a.number(own), y = b.number(own);
  if (!std::isnan(x) && !std::isnan(y)) return {x, y};
  return {a.number(name), b.number(name)};
}

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) || (std::isnan(a) && std::isnan(b));
}

std::map<int64_t, records::ReadRow> logged_steps(const fs::path& run) {
  std::map<int64_t, records::ReadRow> rows;
  records::read_metrics(run / "metrics.jsonl", [&](const records::ReadRow& row) {
    if (row.step && row.event.empty()) rows[*row.step] = row;
  });
  return rows;
}

void compare_metrics(const fs::path& a, const fs::path& b, Comparison& result) {
  const auto read = [&](const fs::path& run) -> std::map<int64_t, records::ReadRow> {
    try {
      return logged_steps(run);
    } catch (const Error& error) {
      result.not_compared.push_back(error.message());
      return {};
    }
  };
  const auto first = read(a), second = read(b);
  for (const auto& [step, row] : first) {
    const auto other = second.find(step);
    if (other == second.end()) continue;
    ++result.steps;
    if (result.first_number) continue;
    for (const char* name : kNumbers) {
      const auto [x, y] = values_of(row, other->second, name);
      if (same_bits(x, y)) continue;
      result.first_number = {step, name, x, y};
      break;
    }
  }
  result.only_a = static_cast<int64_t>(first.size()) - result.steps;
  result.only_b = static_cast<int64_t>(second.size()) - result.steps;
}

std::string text_of(const checkpoint::StoredTensor& tensor) {
  return std::string(name_of(tensor.dtype)) + tensor.shape.text();
}

std::vector<float> values_of(checkpoint::Reader& reader, const std::string& name) {
  // The reader has checked that they can be counted.
  int64_t elements = 1;
  for (const int64_t size : reader.at(name).shape) elements *= size;
  std::vector<float> values(static_cast<size_t>(elements));
  reader.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<TensorDifference> compare_tensors(const fs::path& a, const fs::path& b) {
  auto first = checkpoint::Reader::open(a, checkpoint::Verification::content);
  auto second = checkpoint::Reader::open(b, checkpoint::Verification::content);
  std::vector<TensorDifference> differences;
  for (const auto& [name, stored] : first.manifest().tensors) {
    const checkpoint::StoredTensor* other = second.find(name);
    if (!other) {
      differences.push_back({name, "only in " + a.string()});
      continue;
    }
    if (!(other->shape == stored.shape) || other->dtype != stored.dtype) {
      differences.push_back({name, text_of(stored) + " against " + text_of(*other)});
      continue;
    }
    // Counters, which the state names too.
    if (!can_convert(stored.dtype, DType::f32)) continue;
    const auto x = values_of(first, name), y = values_of(second, name);
    TensorDifference difference{name, {}};
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) continue;
      if (difference.elements++ == 0)
        difference.first = static_cast<int64_t>(i), difference.a = x[i], difference.b = y[i];
      const double distance = std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
      if (!(distance <= difference.largest)) difference.largest = distance;
    }
    if (difference.elements > 0) differences.push_back(std::move(difference));
  }
  for (const auto& [name, stored] : second.manifest().tensors)
    if (!first.find(name)) differences.push_back({name, "only in " + b.string()});
  return differences;
}

void compare_checkpoints(const fs::path& a, const fs::path& b, Comparison& result) {
  std::map<int64_t, fs::path> first;
  for (const auto& one : checkpoint::list_checkpoints(records::saved_in(a))) first[one.step] = one.path;
  auto others = checkpoint::list_checkpoints(records::saved_in(b));
  std::sort(others.begin(), others.end(), [](const auto& x, const auto& y) { return x.step < y.step; });
  for (const auto& other : others) {
    const auto own = first.find(other.step);
    if (own == first.end()) continue;
    if (result.checkpoint_step) {
      ++result.checkpoints;
      continue;
    }
    try {
      result.tensors = compare_tensors(own->second, other.path);
      ++result.checkpoints;
    } catch (const Error& error) {
      result.not_compared.push_back("step " + std::to_string(other.step) + ": " + error.message());
      continue;
    }
    if (!result.tensors.empty()) result.checkpoint_step = other.step;
  }
}

void compare_recipes(const fs::path& a, const fs::path& b, Comparison& result) {
  const auto resolved = [](const fs::path& stored) {
    config::Request request;
    request.recipe = stored_recipe_file(stored).string();
    return config::resolve(request);
  };
  try {
    const config::Resolution first = resolved(a), second = resolved(b);
    // A recipe of another version may have errors; the numbers are compared nevertheless.
    if (first.ok() && second.ok()) result.recipe = config::diff(first, second);
  } catch (const Error& error) {
    result.not_compared.push_back("recipe: " + error.message());
  }
}

}  // namespace

bool is_stored(const fs::path& path) {
  std::error_code ignored;
  return records::is_run(path) || fs::exists(path / checkpoint::kManifestFile, ignored) ||
         (fs::is_directory(path, ignored) && !checkpoint::list_checkpoints(path).empty());
}

fs::path stored_recipe_file(const fs::path& path) {
  std::error_code ignored;
  const bool itself = records::is_run(path) || fs::exists(path / checkpoint::kManifestFile, ignored);
  return fs::absolute((itself ? path : checkpoint::resolve_checkpoint(path).path) / checkpoint::kRecipeFile);
}

Comparison compare(const fs::path& a, const fs::path& b) {
  Comparison result;
  if (records::is_run(a) && records::is_run(b)) {
    compare_recipes(a, b, result);
    compare_metrics(a, b, result);
    compare_checkpoints(a, b, result);
    return result;
  }
  const auto first = checkpoint::resolve_checkpoint(a), second = checkpoint::resolve_checkpoint(b);
  compare_recipes(records::is_run(a) ? a : first.path, records::is_run(b) ? b : second.path, result);
  result.checkpoints = 1;
  result.tensors = compare_tensors(first.path, second.path);
  if (!result.tensors.empty()) result.checkpoint_step = first.step;
  return result;
}

}  // namespace capstan::train

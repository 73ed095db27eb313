// Where two runs, or two checkpoints, part: the first step whose numbers differ, and the first tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "config/tools/show.hpp"

namespace capstan::train {

struct NumberDifference {  // of a logged step
  int64_t step = 0;
  std::string name;  // "loss"
  double a = 0, b = 0;
};

struct TensorDifference {
  std::string name;  // of the parameter or optimizer state
  // It is only in one of them, or has another shape or type; then there are no numbers.
  std::string problem;
  int64_t cells = 0;    // that differ
  int64_t first = 0;    // index of the first of them, row-major
  double a = 0, b = 0;  // its values
  double largest = 0;   // absolute difference
};

struct Comparison {
  std::vector<config::Change> recipe;
  int64_t steps = 0;               // logged by both
  int64_t only_a = 0, only_b = 0;  // logged by one of them
  // And why: a missing metrics.jsonl, a checkpoint that does not verify.
  std::vector<std::string> not_compared;
  std::optional<NumberDifference> first_number;
  int64_t checkpoints = 0;                 // compared, of the same step in both
  std::optional<int64_t> checkpoint_step;  // the first that differs
  std::vector<TensorDifference> tensors;   // of that one, in the order of their names
  bool same_numbers() const { return !first_number && !checkpoint_step; }
};

// A run, a checkpoint or a directory of checkpoints; anything else names a recipe, if it names anything.
bool is_stored(const std::filesystem::path& path);
// The resolved recipe that a run or a checkpoint keeps. Throws ErrorCode::not_found and ::format.
std::filesystem::path stored_recipe(const std::filesystem::path& path);

// a, b: run directories, or checkpoints. Losses, gradient norms and the like are compared bit by bit, times
// are not. Throws ErrorCode::not_found and ::format.
Comparison compare(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace capstan::train

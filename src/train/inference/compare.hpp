// Finds where two runs or two checkpoints begin to differ: the first step with different numbers, and the
// first tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "config/tools/show.hpp"

namespace capstan::train {

// A number of a logged step that differs between two runs.
struct NumberDifference {
  int64_t step = 0;
  // Name in metrics.jsonl, such as "loss".
  std::string name;
  double a = 0, b = 0;
};

struct TensorDifference {
  // Name of the parameter or optimizer state.
  std::string name;
  // If not empty, the tensor is in one checkpoint only, or has another shape or type. The numbers below are
  // then 0.
  std::string problem;
  // Number of elements that differ.
  int64_t elements = 0;
  // Row-major index of the first element that differs.
  int64_t first = 0;
  // Values of that element in the two checkpoints.
  double a = 0, b = 0;
  // Largest absolute difference of two elements.
  double largest = 0;
};

struct Comparison {
  std::vector<config::Change> recipe;
  // Number of steps that both runs logged.
  int64_t steps = 0;
  // Number of steps that only one run logged.
  int64_t only_a = 0, only_b = 0;
  // Parts that could not be compared, with the reason: a missing metrics.jsonl, or a checkpoint that does not
  // verify.
  std::vector<std::string> not_compared;
  std::optional<NumberDifference> first_number;
  // Number of steps whose checkpoints, present in both runs, were compared.
  int64_t checkpoints = 0;
  // The first step whose checkpoints differ.
  std::optional<int64_t> checkpoint_step;
  // The tensors that differ at checkpoint_step, in the order of their names.
  std::vector<TensorDifference> tensors;
  bool same_numbers() const { return !first_number && !checkpoint_step; }
};

// Whether the path is a run, a checkpoint or a directory of checkpoints, and not a recipe.
bool is_stored(const std::filesystem::path& path);
// The resolved recipe that a run or a checkpoint keeps. Throws ErrorCode::not_found and ::format.
std::filesystem::path stored_recipe_file(const std::filesystem::path& path);

// a, b: run directories, or checkpoints. Losses, gradient norms and the like are compared bit by bit, times
// are not. Throws ErrorCode::not_found and ::format.
Comparison compare(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace capstan::train

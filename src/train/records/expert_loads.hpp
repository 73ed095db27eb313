// The load of each expert over a run, for its page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "train/records/metrics.hpp"

namespace capstan::records {

// Collects matrices of layers by experts at logged steps, evenly spaced over the run and at its last step.
class ExpertLoads {
 public:
  // most: bound of the number of loads that json() writes, over all steps.
  explicit ExpertLoads(size_t most) : most_(most) {}
  // Takes the lists `expert_load_layer_N` of a row of a logged step. A row with other layers or another
  // number of experts than the first one is left out.
  void add(const ReadRow& row);
  // {"layers":[1,…],"experts":E,"steps":[…],"loads":[[…],…]}: of each step the loads, layer by layer,
  // relative to an equal load, with three digits. Empty without experts,
  // and where one matrix has more than `most` loads.
  std::string json() const;

 private:
  struct Step {
    int64_t step = 0;
    std::vector<float> loads;
  };
  size_t most_steps() const;

  size_t most_;
  std::vector<int64_t> layers_;
  size_t experts_ = 0;
  // The rows whose index is a multiple of stride_, and the last one.
  std::vector<Step> steps_;
  Step last_;
  size_t rows_ = 0, stride_ = 1;
};

}  // namespace capstan::records

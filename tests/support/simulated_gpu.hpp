// The compute capability of the simulated GPU.
#pragma once

#include <string_view>

#include "kernels/simulated/cublaslt.hpp"

namespace capstan::test {

// Another GPU is simulated as long as it lives: 89 for 8.9, 90 for 9.0.
class SimulatedGpu {
 public:
  explicit SimulatedGpu(int capability) : before_(kernels::simulated::compute_capability()) {
    kernels::simulated::set_compute_capability(capability);
  }
  ~SimulatedGpu() { kernels::simulated::set_compute_capability(before_); }
  SimulatedGpu(const SimulatedGpu&) = delete;
  SimulatedGpu& operator=(const SimulatedGpu&) = delete;

 private:
  int before_;
};

// A GPU that multiplies in the precision whose name this is, or is a part of it.
inline int capability_for(std::string_view precision) {
  const auto names = [&](const char* part) { return precision.find(part) != std::string_view::npos; };
  return names("mxfp8") || names("nvfp4") ? 100 : 90;
}

}  // namespace capstan::test

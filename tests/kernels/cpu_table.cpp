// The kernel tests on the CPU's kernels.
#include "kernels/cpu/level.hpp"
#include "tests/kernels/support.hpp"

namespace capstan::testing {

const kernels::Table& table() {
  return kernels::cpu_table();
}
std::string kernel_folder() {
  return "kernels/cpu/";
}
bool are_simulated() {
  return false;
}
std::optional<uint64_t> third_of_cases() {
#ifdef CAPSTAN_AMX_EMULATED
  return 0;
#endif
  if (!test::kSanitized) return std::nullopt;
  return static_cast<uint64_t>(kernels::cpu_level()) % 3;
}
bool rounds_attention_weights() {
  return false;
}
size_t workspace_bytes() {
  return size_t{8} << 20;
}
bool reads_heap_alone() {
  return false;
}
void prepare_launch(int) {}

}  // namespace capstan::testing

// The kernel tests on the CPU's kernels.
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
bool rounds_attention_weights() {
  return false;
}
size_t workspace_bytes() {
  return size_t{8} << 20;
}
void prepare_launch(int) {}

}  // namespace capstan::testing

// The kernel tests on the CUDA kernels, compiled for the host. CAPSTAN_TEST_FULL: at the sizes of a GPU
// (scripts/cuda.sh all).
#include <cstdlib>

#include "kernels/simulated/order.hpp"
#include "kernels/simulated/table.hpp"
#include "tests/kernels/support.hpp"

namespace capstan::testing {

const kernels::Table& table() {
  return kernels::simulated_table();
}
std::string kernel_folder() {
  return "kernels/cuda/";
}
bool are_simulated() {
  return std::getenv("CAPSTAN_TEST_FULL") == nullptr;
}
std::optional<uint64_t> third_of_cases() {
  return std::nullopt;
}
bool rounds_attention_weights() {
  return true;
}
size_t workspace_bytes() {
  return size_t{are_simulated() ? 8u : 64u} << 20;
}
bool reads_heap_alone() {
  return false;
}
void prepare_launch(int number) {
  using kernels::simulated::Order;
  const Order orders[] = {{Order::Kind::forward, 0},
                          {Order::Kind::reverse, 0},
                          {Order::Kind::random, 1},
                          {Order::Kind::random, 2}};
  kernels::simulated::set_order(orders[number % 4]);
}

}  // namespace capstan::testing

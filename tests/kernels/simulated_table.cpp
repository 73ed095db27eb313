// The kernel tests on the CUDA kernels, compiled for the host.
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
  return true;
}
bool rounds_attention_weights() {
  return true;
}
size_t workspace_bytes() {
  return size_t{8} << 20;
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

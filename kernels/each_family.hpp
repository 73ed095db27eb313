// The families of a table by name.
#pragma once

#include <cstddef>

#include "kernels/table.hpp"

namespace capstan::kernels {

// visit("gemm", &Table::gemm), and so on.
template <class Visit>
void for_each_family(const Visit& visit) {
  visit("gemm", &Table::gemm);
  visit("norm", &Table::norm);
  visit("head_norm", &Table::head_norm);
  visit("activation", &Table::activation);
  visit("rope", &Table::rope);
  visit("attention", &Table::attention);
  visit("attention_sink", &Table::attention_sink);
  visit("context_attention", &Table::context_attention);
  visit("embedding", &Table::embedding);
  visit("router", &Table::router);
  visit("expert_permutation", &Table::expert_permutation);
  visit("cross_entropy", &Table::cross_entropy);
  visit("decoding", &Table::decoding);
  visit("elementwise", &Table::elementwise);
  visit("optimizers", &Table::optimizers);
  visit("adapter", &Table::adapter);
  visit("quantize", &Table::quantize);
  visit("step_control", &Table::step_control);
  static_assert(offsetof(Table, scale_order) == 18 * sizeof(void*), "a family without a line above");
}

}  // namespace capstan::kernels

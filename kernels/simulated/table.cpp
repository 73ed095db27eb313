#include "kernels/simulated/table.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/simulated/cublaslt.hpp"

namespace capstan::kernels {

const Table& simulated_table() {
  return simulated::table_of_families();
}

const Table& gpu_estimate_table() {
  static const Gemm gemm = [] {
    Gemm family = *simulated_table().gemm;
    family.run_workspace = [](GemmShape shape, GemmTypes types, float alpha, float beta) {
      const simulated::SizesOfGpu sizes;
      return simulated_table().gemm->run_workspace(shape, types, alpha, beta);
    };
    return family;
  }();
  static const Table table = [] {
    Table families = simulated_table();
    families.gemm = &gemm;
    return families;
  }();
  return table;
}

}  // namespace capstan::kernels

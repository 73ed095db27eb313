// Bytes of shared memory that a block of threads may have on a GPU.
#pragma once

#include <cstddef>

namespace capstan::kernels {

// Limit of the arrays of constant size, and, unless the launch raises it for its kernel, of these and the
// bytes of the launch together (CUDA Programming Guide, "Shared Memory").
inline constexpr size_t kDefaultSharedBytes = size_t{48} << 10;
// Limit of both together on a GPU of this compute capability (90 for 9.0). Kernels whose need depends on the
// shape ask for most_shared_bytes() of their device.
constexpr size_t shared_bytes_of(int compute_capability) {
  const bool is_large = compute_capability >= 90 && compute_capability < 120;
  const bool is_a100 = compute_capability == 80 || compute_capability == 87;
  return size_t{is_large ? 227u : is_a100 ? 163u : 99u} << 10;
}
inline constexpr size_t kMaxSharedBytes = shared_bytes_of(90);
// Whether a launch with so many bytes raises the limit of its kernel. The rest of the default is for the
// arrays of constant size: the simulation fails where a kernel has more of them.
constexpr bool raises_shared_limit(size_t launch_bytes) {
  constexpr size_t kOfConstantSize = size_t{32} << 10;
  return launch_bytes > kDefaultSharedBytes - kOfConstantSize;
}

}  // namespace capstan::kernels

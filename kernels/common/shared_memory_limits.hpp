// Bytes of shared memory that a block of threads may have on a GPU.
#pragma once

#include <cstddef>

namespace capstan::kernels {

// Limit of the arrays of constant size, and, unless the launch raises it for its kernel, of these and the
// bytes of the launch together (CUDA Programming Guide, "Shared Memory").
inline constexpr size_t kDefaultSharedBytes = size_t{48} << 10;
// Limit of both together on sm_90 and sm_100. sm_80 has 163 KiB, sm_86, sm_89 and sm_120 have 99: kernels
// whose need depends on the shape ask for most_shared_bytes() of their device.
inline constexpr size_t kMaxSharedBytes = size_t{227} << 10;
// Whether a launch with so many bytes raises the limit of its kernel. The rest of the default is for the
// arrays of constant size: the simulation fails where a kernel has more of them.
constexpr bool raises_shared_limit(size_t launch_bytes) {
  constexpr size_t kOfConstantSize = size_t{32} << 10;
  return launch_bytes > kDefaultSharedBytes - kOfConstantSize;
}

}  // namespace capstan::kernels

// Marks an inline function that kernels of every device may call: nvcc compiles it for the host and for the
// GPU.
#pragma once

#ifdef __CUDACC__
#define CAPSTAN_HOST_DEVICE __host__ __device__
#else
#define CAPSTAN_HOST_DEVICE
#endif

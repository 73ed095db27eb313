// Time of kernels on one GPU: GEMMs by their shape, attention by its FLOPs, other kernels by the bytes that
// they move. Formulas: docs/planning.md, Kernels.
#pragma once

#include "planner/cluster.hpp"
#include "planner/run_shape.hpp"

namespace capstan::planner {

// Dense peak of a format in FLOP/s. Throws ErrorCode::config where the cluster has no figure for it.
double peak_flops(const Cluster& cluster, GemmFormat format);

// Seconds of `count` GEMMs [rows, inner] x [inner, columns] that run together (a grouped GEMM). Their tiles
// are divided over the multiprocessors in waves, of which the last one is not full; of several tile sizes the
// fastest counts.
double gemm_seconds(const Cluster& cluster, GemmFormat format, double rows, double columns, double inner,
                    double count = 1);

// Rate of attention over sequences of `length` tokens by that over 4096.
double attention_rate(const Cluster& cluster, double length);

// Seconds of kernels that move `bytes` to and from memory in `kernels` launches.
double memory_seconds(const Cluster& cluster, double bytes, double kernels = 1);

}  // namespace capstan::planner

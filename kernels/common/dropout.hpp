// The dropout mask, and the factors of jitter. They depend only on the key of the use (seed, purpose, layer)
// and on the element's global position, never on the layout: each token has a 64-bit row index
// (consumed-sample number and position).
#pragma once

#include "base/philox.hpp"

namespace capstan::kernels {

CAPSTAN_HOST_DEVICE inline uint32_t dropout_threshold(float p) {
  return static_cast<uint32_t>(static_cast<double>(p) * 4294967296.0);
}
// Hidden dropout of column c of a token: word c % 4 of Philox block (dropout_row, c / 4). dropout_row: the
// token's dropout row index, unique in the run and the same on every layout.
CAPSTAN_HOST_DEVICE inline bool keep_hidden(PhiloxKey key, int64_t dropout_row, int64_t column,
                                            uint32_t threshold) {
  return philox4x32(key, static_cast<uint64_t>(dropout_row),
                    static_cast<uint64_t>(column) >> 2)[column & 3] >= threshold;
}
// Jitter: the factor of column c of a token, uniform in [1 - epsilon, 1 + epsilon], from the same word.
CAPSTAN_HOST_DEVICE inline float jitter_factor(uint32_t word, float epsilon) {
  return (1.0f - epsilon) + static_cast<float>(word >> 8) * (epsilon * 0x1p-23f);
}
// Attention dropout of (query's dropout row index, global head, key position): word key % 4 of block
// (dropout_row, head << 40 | key / 4).
CAPSTAN_HOST_DEVICE inline bool keep_attention(PhiloxKey key, int64_t dropout_row, int64_t head,
                                               int64_t key_position, uint32_t threshold) {
  return philox4x32(key, static_cast<uint64_t>(dropout_row),
                    static_cast<uint64_t>(head) << 40 |
                        static_cast<uint64_t>(key_position) >> 2)[key_position & 3] >= threshold;
}

}  // namespace capstan::kernels

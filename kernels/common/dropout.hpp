// The dropout mask. It depends only on the key of the use (seed, purpose, layer) and on the element's global
// position, never on the layout: each token has a 64-bit row index (consumed-sample number and position).
#pragma once

#include "base/philox.hpp"

namespace capstan::kernels {

// Hidden dropout of column c of the token with this row id: word c % 4 of block (row_id, c / 4).
inline uint32_t dropout_threshold(float p) {
  return static_cast<uint32_t>(static_cast<double>(p) * 4294967296.0);
}
inline bool keep_hidden(PhiloxKey key, int64_t row_id, int64_t column, uint32_t threshold) {
  return philox4x32(key, static_cast<uint64_t>(row_id), static_cast<uint64_t>(column) >> 2)[column & 3] >=
         threshold;
}
// Attention dropout of (query row id, global head, key position): word key % 4 of block (row_id, head << 40 |
// key / 4).
inline bool keep_attention(PhiloxKey key, int64_t row_id, int64_t head, int64_t key_position,
                           uint32_t threshold) {
  return philox4x32(key, static_cast<uint64_t>(row_id),
                    static_cast<uint64_t>(head) << 40 |
                        static_cast<uint64_t>(key_position) >> 2)[key_position & 3] >= threshold;
}

}  // namespace capstan::kernels

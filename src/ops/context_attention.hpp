// Attention when the tokens of each sequence are sharded over the ranks of a context-parallel group. All
// other operations of a layer work per token and need no communication.
#pragma once

#include "comm/communicator.hpp"
#include "ops/attention.hpp"
#include "ops/context_rows.hpp"

namespace capstan::ops {

// How a rank's queries reach the keys of other ranks.
enum class ContextExchange : uint8_t {
  // Ring attention: a rank receives the next block of keys and values while it computes with the current one.
  p2p,
  // Every rank gathers all keys and values.
  all_gather,
  // DeepSpeed-Ulysses: an all-to-all gives each rank all rows of a subset of the heads.
  a2a,
  // a2a within `inner`, a ring over `outer`.
  a2a_p2p,
};

struct ContextParallel {
  ContextExchange exchange = ContextExchange::p2p;
  // All ranks that hold shards of the same sequences; null or one rank: not sharded.
  comm::Communicator* group = nullptr;
  // a2a_p2p only: rank in group = rank in outer * inner's size + rank in inner. The ranks of `inner` are
  // adjacent, so that their combined chunks are those of one rank of a group of outer's size
  // (head_exchange.hpp).
  comm::Communicator* inner = nullptr;
  comm::Communicator* outer = nullptr;
  int64_t size() const { return comm::ranks_of(group); }
};

// ops::attention for this rank's rows: qkv [batch * seq, row] with options.seq = S / CP rows of each sequence
// of S tokens, at the positions context_rows(CP, rank, S). documents.start [batch * seq] holds positions in
// the full sequence, documents.cu_seqlens describes the full sequences, dropout_rows has the indices of these
// rows. Equal to attention over the full sequences, dropout included; bitwise reproducible for the same
// layout. Collective over the group, forward and backward (recomputed regions too). ErrorCode::config when S
// or the heads cannot be divided this way.
//
// Saves qkv, out and one statistic as ops::attention does, and with a QK norm also the transformed qkv. With
// a2a these are S / CP * I rows of 1 / I of the heads, and the output in addition (I: the ranks of a2a).
//
// Bytes sent by each rank, N = batch * seq; kv = N * groups * 2 * head_dim elements of qkv's type, dkv = as
// many of fp32:
//
//   p2p, all_gather   forward (CP-1) kv               backward (CP-1) (kv + dkv)
//   a2a               forward (CP-1) (qkv' + out')    backward (CP-1) (out' + dqkv')
//   a2a_p2p           a2a with I for CP, and a ring over O = CP / I ranks of I * N rows and the groups that
//                     one rank got
//
//   qkv', out'        N rows of one rank's subset of heads, qkv' with their keys and values
//   dqkv'             as qkv', fp32 where keys and values are on several ranks
//
// Forward a2a also sends (CP-1) N times 4 bytes with documents and 8 with dropout.
Var context_attention(Tape& tape, Var qkv, const AttentionOptions& options, const ContextParallel& context);

}  // namespace capstan::ops

// Attention when the tokens of each sequence are cut over the ranks of a context-parallel group. Everything else in a layer is
// per token and needs nothing.
#pragma once

#include "comm/communicator.hpp"
#include "ops/attention.hpp"
#include "ops/context_rows.hpp"

namespace capstan::ops {

// How queries and keys of different ranks meet.
enum class ContextExchange : uint8_t {
  // Keys and values go round a ring; the next ones are received while these are computed.
  p2p,
  // Every rank gathers all keys and values.
  all_gather,
  // Heads are exchanged for rows: each rank attends over whole sequences with its share of the heads.
  a2a,
  // a2a within `inner`, a ring over `outer`.
  a2a_p2p,
};

struct ContextParallel {
  ContextExchange exchange = ContextExchange::p2p;
  // All ranks that hold parts of the same sequences; null or one rank: not cut.
  comm::Communicator* group = nullptr;
  // a2a_p2p only: rank in group = rank in outer * inner's size + rank in inner. The ranks of `inner` are adjacent, so that their
  // chunks together are the chunks of one rank among outer's size (head_exchange.hpp).
  comm::Communicator* inner = nullptr;
  comm::Communicator* outer = nullptr;
  int64_t size() const { return group ? group->size() : 1; }
};

// As ops::attention, of this rank's rows: qkv [batch * seq, row] with options.seq = S / CP rows of each sequence of S tokens, at
// the positions context_rows(CP, rank, S). document_start [batch * seq] holds positions in the whole sequence, row_ids the rows'
// own ids. Equal to attention of the whole sequences, dropout included; the same bits for the same layout. Collective over the
// group, forward and backward (recomputed regions too).
// ErrorCode::config when S or the heads cannot be cut so.
//
// Keeps qkv, out and a statistic as ops::attention does, after an exchange of heads, where there is one: for S / CP * I rows
// and 1 / I of the heads, beside the output itself (I: the ranks of a2a).
//
// Bytes that a rank sends, N = batch * seq; kv = N * groups * 2 * head_dim elements of qkv's type, dkv = as many of fp32:
//   p2p, all_gather   forward (CP-1) kv                  backward (CP-1) (kv + dkv)
//   a2a               forward (CP-1) (qkv' + out')       backward (CP-1) (out' + dqkv')
//                     qkv', out': N rows of the heads that one rank gets, qkv' with their keys and values; dqkv' as qkv',
//                     fp32 where keys and values are on several ranks. Forward also (CP-1) N times 4 bytes with documents
//                     and 8 with dropout.
//   a2a_p2p           a2a with I for CP, and a ring over O = CP / I ranks of I * N rows and the groups that one rank got.
Var context_attention(Tape& tape, const Var& qkv, const AttentionOptions& options,
                      const ContextParallel& context);

}  // namespace capstan::ops

// Exchanges of matrix rows between the ranks of a group, whose numbers of rows may differ. Every rank of the
// group calls the same operations in the same order. Counts have one element for each rank of the group, and
// rows lie in the order of these ranks. The count that rank A sends to rank B equals the count that B
// receives from A (exchange_counts() gives each rank what it will receive); two ranks with a count of 0
// transfer nothing.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

int64_t total(std::span<const int64_t> counts);

struct RowCounts {
  std::vector<int64_t> sent, received;

  // The counts of the exchange that returns the rows.
  RowCounts reversed() const { return {received, sent}; }
};

// An exchange of rows whose transfers run beside later operations: between the constructor and wait() in the
// forward pass, and between the same places in the backward pass, where the gradient goes the other way.
class RowExchange {
 public:
  // x [sum of counts.sent, cols]. purpose: what the rows are, for errors of the transport: "rows of the
  // experts of layer 3".
  RowExchange(Tape& tape, const Var& x, RowCounts counts, comm::Communicator& group,
              const std::string& purpose);
  // y [sum of counts.received, cols]. Called once.
  Var wait(Tape& tape);

 private:
  struct State;
  std::shared_ptr<State> state_;
  Var received_;
};

// The same without other operations meanwhile.
Var exchange_rows(Tape& tape, const Var& x, const RowCounts& counts, comm::Communicator& group,
                  const std::string& purpose);

// y [sum of counts, cols]: the rows of all ranks, of which this rank has counts[its rank]. Gradient:
// reduce_rows().
Var gather_rows(Tape& tape, const Var& x, const std::vector<int64_t>& counts, comm::Communicator& group,
                const std::string& purpose);
// y [counts[its rank], cols]: the sum over the ranks of their x [sum of counts, cols], in rank order and in
// fp32, of which each rank gets its rows. Gradient: gather_rows().
Var reduce_rows(Tape& tape, const Var& x, const std::vector<int64_t>& counts, comm::Communicator& group,
                const std::string& purpose);

// How many rows the experts of each rank get from the tokens of each other.
struct ExpertRows {
  // Between the ranks of the `expert` group.
  RowCounts exchanged;
  // Rows that each rank of the `tensor` group has received; one element without such a group.
  std::vector<int64_t> gathered;
  // i64 [tensor ranks * expert ranks, experts here]: the order in which gathered rows lie.
  Tensor of_experts;
};

// The ranks over which experts are sharded (comm/mesh.hpp). Null: one rank.
struct ExpertParallel {
  // Ranks that hold different experts: `ep`.
  comm::Communicator* expert = nullptr;
  // Ranks that hold different parts of the width of the same experts: `etp`.
  comm::Communicator* tensor = nullptr;
  // Both: `etp-ep`, expert tensor-parallel ranks first.
  comm::Communicator* expert_tensor = nullptr;
};

// Exchanges sizes i64 [experts]: the rows that this rank has for each expert of all ranks, which are several.
// The host waits for the device, once; a recomputed region uses the counts of its first pass, without
// waiting. On the meta device the load is equal: `rows` rows over all experts. purpose: "experts of layer 3".
// ErrorCode::rank_failure names a rank that announces an impossible count.
ExpertRows exchange_counts(Tape& tape, const Tensor& sizes, int64_t rows, const ExpertParallel& ranks,
                           const std::string& purpose);
// Where each rank has `capacity` rows for each expert (sizes as above), so that the host need not wait.
ExpertRows equal_counts(const Tensor& sizes, int64_t capacity, const ExpertParallel& ranks);

}  // namespace capstan::ops

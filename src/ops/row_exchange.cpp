#include "ops/row_exchange.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "comm/channel.hpp"
#include "kernels/table.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/matmul.hpp"
#include "tensor/flat_range.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

int64_t total(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

namespace {

using Ranges = std::vector<FlatRange>;

// The rows of each rank, which follow each other.
Ranges ranges_of(std::span<const int64_t> counts) {
  Ranges ranges;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    ranges.push_back({begin, count});
    begin += count;
  }
  return ranges;
}

void check_counts(const char* operation, std::span<const int64_t> counts, const comm::Communicator& group) {
  CAPSTAN_ASSERT(static_cast<int>(counts.size()) == group.size() &&
                     std::ranges::all_of(counts, [](int64_t count) { return count >= 0; }),
                 std::string(operation) + ": counts of " + std::to_string(counts.size()) + " ranks in `" +
                     group.name() + "`, or below 0");
}
Tensor rows_like(const Tensor& x, int64_t rows) {
  return Tensor::empty(x.device(), {rows, x.size(1)}, x.dtype());
}
double bytes_of_others(const Tensor& x, int64_t rows, int64_t own) {
  return static_cast<double>((rows - own) * x.size(1) * size_of(x.dtype()));
}

// Rows sent[r] of `from` go to rank r, rows received[r] of `to` come from it. This rank's own are copied.
comm::PendingTransfers start_rows(const Tensor& from, const Ranges& sent, const Tensor& to,
                                  const Ranges& received, comm::Communicator& group,
                                  const std::string& purpose) {
  const auto me = static_cast<size_t>(group.rank()), ranks = sent.size();
  CAPSTAN_ASSERT(sent[me].count == received[me].count, "rows of a rank for itself: " + purpose);
  if (sent[me].count > 0) copy_matrix(rows_of(from, sent[me]), rows_of(to, received[me]));
  comm::TransferBatch batch(purpose);
  // Each rank sends to a different one at a time.
  for (size_t shift = 1; shift < ranks; ++shift) {
    const size_t next = (me + shift) % ranks, previous = (me + ranks - shift) % ranks;
    if (sent[next].count > 0) batch.send(rows_of(from, sent[next]), static_cast<int>(next));
    if (received[previous].count > 0)
      batch.receive(rows_of(to, received[previous]), static_cast<int>(previous));
  }
  if (batch.transfers().empty()) {
    // All ranks start the same batches, also one that has nothing to transfer.
    const Tensor nothing = Tensor::zeros(from.device(), {2}, DType::i32);
    batch.send(nothing.slice(0, 0, 1), group.rank()).receive(nothing.slice(0, 1, 1), group.rank());
  }
  return group.channel().start(std::move(batch));
}

}  // namespace

// ---- exchange

struct RowExchange::State {
  RowCounts counts;
  comm::Communicator& group;
  std::string purpose;
  // State of the current pass, forward and later backward.
  comm::PendingTransfers transfers;
  // The gradient of x while it arrives.
  Tensor dx;
};

RowExchange::RowExchange(Tape& tape, const Var& x, RowCounts counts, comm::Communicator& group,
                         const std::string& purpose) {
  check_counts("exchange_rows", counts.sent, group);
  check_counts("exchange_rows", counts.received, group);
  check_rows("exchange_rows", x.value, total(counts.sent));
  state_ = std::make_shared<State>(State{std::move(counts), group, purpose, {}, {}});
  const RowCounts& rows = state_->counts;
  const int64_t own = rows.sent[static_cast<size_t>(group.rank())];
  const Tensor y = rows_like(x.value, total(rows.received));
  traced(tape.context(), 'C', "start exchange of " + purpose, [&] {
    state_->transfers =
        start_rows(x.value, ranges_of(rows.sent), y, ranges_of(rows.received), group, purpose);
  });
  received_ = tape.record({.name = "start_exchange_rows",
                           .inputs = {x},
                           .outputs = {y},
                           .cost = {.sent_bytes = bytes_of_others(x.value, x.size(0), own)},
                           .backward = [state = state_](BackwardContext& ctx) {
                             traced(ctx.context(), 'C', "wait for gradients of " + state->purpose,
                                    [&] { state->transfers.wait(); });
                             ctx.accumulate_gradient(0, std::exchange(state->dx, Tensor()));
                           }})[0];
}

Var RowExchange::wait(Tape& tape) {
  traced(tape.context(), 'C', "wait for exchange of " + state_->purpose, [&] { state_->transfers.wait(); });
  const Var received = std::exchange(received_, Var());
  const Tensor& y = received.value;
  const int64_t own = state_->counts.sent[static_cast<size_t>(state_->group.rank())];
  return tape.record({.name = "exchange_rows",
                      .inputs = {received},
                      .outputs = {y},
                      .backward_cost = {.sent_bytes = bytes_of_others(y, y.size(0), own)},
                      .backward = [state = state_](BackwardContext& ctx) {
                        const Tensor& dy = ctx.output_gradient();
                        const RowCounts& rows = state->counts;
                        state->dx = rows_like(dy, total(rows.sent));
                        traced(ctx.context(), 'C', "start exchange of gradients of " + state->purpose, [&] {
                          state->transfers =
                              start_rows(dy, ranges_of(rows.received), state->dx, ranges_of(rows.sent),
                                         state->group, "gradients of " + state->purpose);
                        });
                        // Reaches the backward function of the start, which takes dx instead.
                        ctx.accumulate_gradient(0, dy);
                      }})[0];
}

Var exchange_rows(Tape& tape, const Var& x, const RowCounts& counts, comm::Communicator& group,
                  const std::string& purpose) {
  return RowExchange(tape, x, counts, group, purpose).wait(tape);
}

// ---- rows of all ranks, and their sums

namespace {

// The counts, group and purpose of an operation over the rows of all ranks, which its gradient needs too.
struct RowsOfRanks {
  std::vector<int64_t> counts;
  comm::Communicator& group;
  std::string purpose;

  size_t me() const { return static_cast<size_t>(group.rank()); }
  int64_t own() const { return counts[me()]; }
  int64_t others() const { return static_cast<int64_t>(counts.size()) - 1; }

  Tensor gathered(StepContext& context, const Tensor& x, const std::string& what) const {
    const Tensor y = rows_like(x, total(counts));
    traced(context, 'C', "gather " + what, [&] {
      start_rows(x, Ranges(counts.size(), {0, own()}), y, ranges_of(counts), group, what).wait();
    });
    return y;
  }
  Tensor reduced(StepContext& context, const Tensor& x, const std::string& what) const {
    const auto ranks = static_cast<int64_t>(counts.size());
    const Tensor y = rows_like(x, own());
    CategoryScope category(MemoryCategory::workspace);
    const Tensor parts = rows_like(x, ranks * own());
    traced(context, 'C', "sum " + what, [&] {
      start_rows(x, ranges_of(counts), parts, ranges_of(std::vector<int64_t>(counts.size(), own())), group,
                 what)
          .wait();
      launch(x.device(), x.device().table().elementwise->sum_parts, parts, ranks, y, y.elements());
    });
    return y;
  }
  // Bytes that this rank sends.
  Cost cost_of_gather(const Tensor& x) const {
    return {.sent_bytes = static_cast<double>(others()) * bytes_of_others(x, own(), 0)};
  }
  Cost cost_of_reduce(const Tensor& x) const {
    return {.sent_bytes = bytes_of_others(x, total(counts), own())};
  }
};

}  // namespace

Var gather_rows(Tape& tape, const Var& x, const std::vector<int64_t>& counts, comm::Communicator& group,
                const std::string& purpose) {
  check_counts("gather_rows", counts, group);
  const RowsOfRanks rows{counts, group, purpose};
  check_rows("gather_rows", x.value, rows.own());
  return tape.record({.name = "gather_rows",
                      .inputs = {x},
                      .outputs = {rows.gathered(tape.context(), x.value, purpose)},
                      .cost = rows.cost_of_gather(x.value),
                      .backward_cost = rows.cost_of_reduce(x.value),
                      .backward = [rows](BackwardContext& ctx) {
                        ctx.accumulate_gradient(0, rows.reduced(ctx.context(), ctx.output_gradient(),
                                                                "gradients of " + rows.purpose));
                      }})[0];
}

Var reduce_rows(Tape& tape, const Var& x, const std::vector<int64_t>& counts, comm::Communicator& group,
                const std::string& purpose) {
  check_counts("reduce_rows", counts, group);
  const RowsOfRanks rows{counts, group, purpose};
  check_rows("reduce_rows", x.value, total(counts));
  return tape.record({.name = "reduce_rows",
                      .inputs = {x},
                      .outputs = {rows.reduced(tape.context(), x.value, purpose)},
                      .cost = rows.cost_of_reduce(x.value),
                      .backward_cost = rows.cost_of_gather(x.value),
                      .backward = [rows](BackwardContext& ctx) {
                        ctx.accumulate_gradient(0, rows.gathered(ctx.context(), ctx.output_gradient(),
                                                                 "gradients of " + rows.purpose));
                      }})[0];
}

// ---- counts

namespace {

// Counts of several ranks: those that this rank sends, i64 [experts]; then, for each rank of the tensor
// group, those that it has received, i64 [expert ranks, experts of a rank].
struct CountTable {
  int64_t experts, expert_ranks, tensor_ranks, tensor_rank;

  CountTable(const Tensor& sizes, const ExpertParallel& ranks)
      : experts(sizes.elements()),
        expert_ranks(comm::ranks_of(ranks.expert)),
        tensor_ranks(comm::ranks_of(ranks.tensor)),
        tensor_rank(comm::rank_in(ranks.tensor)) {
    CAPSTAN_ASSERT(sizes.dtype() == DType::i64 && sizes.is_contiguous() && experts % expert_ranks == 0,
                   "counts " + sizes.text() + " of experts over " + std::to_string(expert_ranks) + " ranks");
  }
  int64_t here() const { return experts / expert_ranks; }
  int64_t elements() const { return (1 + tensor_ranks) * experts; }
  Tensor sent(const Tensor& all) const { return all.flat_range(0, experts, {1, experts}); }
  Tensor received(const Tensor& all, int64_t by) const {
    return all.flat_range((1 + by) * experts, experts, {1, experts});
  }
  Tensor received(const Tensor& all) const {
    return all.flat_range(experts, tensor_ranks * experts, {tensor_ranks * expert_ranks, here()});
  }
};

Tensor transfer_counts(const CountTable& table, const Tensor& sizes, const ExpertParallel& ranks,
                       const std::string& purpose) {
  const Tensor all = Tensor::empty(sizes.device(), {table.elements()}, DType::i64);
  const Tensor sent = table.sent(all), received = table.received(all, table.tensor_rank);
  copy_matrix(sizes.view({1, table.experts}), sent);
  ranks.expert->channel()
      .start(comm::TransferBatch("row counts of " + purpose).all_to_all(sent, received))
      .wait();
  if (table.tensor_ranks > 1)
    ranks.tensor->channel()
        .start(comm::TransferBatch("received row counts of " + purpose)
                   .all_gather(received, table.received(all)))
        .wait();
  return all;
}

// An equal load, as far as `rows` divides: every rank has the same counts.
std::vector<int64_t> estimated_counts(const CountTable& table, int64_t rows, int64_t expert_rank) {
  std::vector<int64_t> counts(static_cast<size_t>(table.elements()));
  const auto of = [&](int64_t expert) {
    return rows / table.experts + (expert < rows % table.experts ? 1 : 0);
  };
  for (int64_t i = 0; i < table.elements(); ++i)
    counts[static_cast<size_t>(i)] =
        of(i < table.experts ? i : expert_rank * table.here() + i % table.here());
  return counts;
}

// Refuses counts that no correct rank sends: a rank is out of step, or there is a bug.
void check_announced(const CountTable& table, std::span<const int64_t> counts, const ExpertParallel& ranks,
                     const std::string& purpose) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto wrong = std::ranges::find_if(counts, [](int64_t n) { return n < 0 || n > kMost; });
  if (wrong == counts.end()) return;
  const int64_t i = wrong - counts.begin(), at = i % table.experts, me = ranks.expert->rank();
  const bool own = i < table.experts;
  const int64_t from = own ? me : at / table.here(),
                expert = own ? at : me * table.here() + at % table.here();
  std::string to;
  if (table.tensor_ranks > 1 && !own)
    to = " to rank " + std::to_string(i / table.experts - 1) + " of `" + ranks.tensor->name() + "`";
  fail(ErrorCode::rank_failure, "rank " + std::to_string(from) + " of `" + ranks.expert->name() +
                                    "` announces" + to + " " + std::to_string(*wrong) + " rows for expert " +
                                    std::to_string(expert) + " of the " + purpose);
}

// Sums of the counts of each rank: `ranks` runs of as many elements.
std::vector<int64_t> sums_of_runs(std::span<const int64_t> counts, int64_t ranks) {
  const size_t run = counts.size() / static_cast<size_t>(ranks);
  std::vector<int64_t> sums;
  for (int64_t r = 0; r < ranks; ++r)
    sums.push_back(total(counts.subspan(static_cast<size_t>(r) * run, run)));
  return sums;
}

}  // namespace

ExpertRows exchange_counts(Tape& tape, const Tensor& sizes, int64_t rows, const ExpertParallel& ranks,
                           const std::string& purpose) {
  return tape.choice([&] {
    const CountTable table(sizes, ranks);
    const Tensor all = transfer_counts(table, sizes, ranks, purpose);
    const std::vector<int64_t> counts = tape.device().is_meta()
                                            ? estimated_counts(table, rows, ranks.expert->rank())
                                            : all.to_host<int64_t>();
    check_announced(table, counts, ranks, purpose);
    const std::span<const int64_t> host = counts;
    const auto experts = static_cast<size_t>(table.experts);
    CAPSTAN_ASSERT(total(host.first(experts)) <= rows, "more rows than tokens choose experts: " + purpose);
    ExpertRows result;
    result.exchanged.sent = sums_of_runs(host.first(experts), table.expert_ranks);
    result.exchanged.received = sums_of_runs(
        host.subspan(static_cast<size_t>(1 + table.tensor_rank) * experts, experts), table.expert_ranks);
    result.gathered = sums_of_runs(host.subspan(experts), table.tensor_ranks);
    result.of_experts = table.received(all);
    return result;
  });
}

ExpertRows equal_counts(const Tensor& sizes, int64_t capacity, const ExpertParallel& ranks) {
  const CountTable table(sizes, ranks);
  const auto expert_ranks = static_cast<size_t>(table.expert_ranks),
             tensor_ranks = static_cast<size_t>(table.tensor_ranks);
  ExpertRows result;
  result.exchanged.sent = result.exchanged.received =
      std::vector<int64_t>(expert_ranks, table.here() * capacity);
  result.gathered = std::vector<int64_t>(tensor_ranks, table.experts * capacity);
  const Tensor all = Tensor::empty(sizes.device(), {table.elements()}, DType::i64);
  for (int64_t rank = 0; rank < table.tensor_ranks; ++rank)
    copy_matrix(sizes.view({1, table.experts}), table.received(all, rank));
  result.of_experts = table.received(all);
  return result;
}

}  // namespace capstan::ops

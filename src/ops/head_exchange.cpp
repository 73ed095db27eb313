#include "ops/head_exchange.hpp"

#include "base/error.hpp"
#include "comm/channel.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {
// The purposes of exchanges.
constexpr std::string_view kToHeads = "rows to heads", kToRows = "heads to rows";

Tensor workspace(Device& device, const Shape& shape, DType type) {
  CategoryScope scope(MemoryCategory::workspace);
  return Tensor::empty(device, shape, type);
}
}  // namespace

HeadExchange::HeadExchange(comm::Communicator* group, kernels::QkvLayout layout, int64_t batch, int64_t seq)
    : group_(group),
      all_(layout),
      mine_(layout),
      ranks_(group ? group->size() : 1),
      batch_(batch),
      seq_(seq) {
  if (is_single()) return;
  const int64_t heads = layout.heads(), groups = layout.groups;
  if (heads % ranks_ != 0 || (groups % ranks_ != 0 && ranks_ % groups != 0))
    fail(ErrorCode::config,
         "heads cannot be exchanged over " + std::to_string(ranks_) + " ranks: " + std::to_string(heads) +
             " heads in " + std::to_string(groups) +
             " groups of keys and values; heads must be a multiple of the ranks, groups a multiple or a "
             "divisor",
         "dist.cp_comm_type=p2p exchanges keys and values instead");
  if (groups >= ranks_) {
    mine_.groups = groups / ranks_;
  } else {
    copies_ = ranks_ / groups;
    mine_ = {1, layout.heads_per_group / copies_, layout.head_dim};
  }
}

int64_t HeadExchange::first_head() const {
  return is_single() ? 0 : group_->rank() * mine_.heads();
}

Tensor HeadExchange::part(const Tensor& parts, int64_t rank) const {
  const int64_t rows = parts.size(0) / ranks_;
  return parts.slice(0, rank * rows, rows);
}

Tensor HeadExchange::exchange(const Tensor& parts, std::string_view purpose) const {
  const Tensor received = workspace(parts.device(), parts.shape(), parts.dtype());
  group_->channel().start(comm::TransferBatch(purpose).all_to_all(parts, received)).wait();
  return received;
}

// by_rank [ranks * batch * seq, width]: the rows of each rank; natural [batch * ranks * seq, width]: in
// sequence order. back: from natural.
void HeadExchange::reorder(const Tensor& by_rank, const Tensor& natural, bool back) const {
  const int64_t chunk = seq_ / 2 * (by_rank.elements() / by_rank.size(0));  // elements
  const Tensor ranks = by_rank.view({ranks_ * batch_, 2 * chunk}),
               full = natural.view({batch_, ranks_ * 2 * chunk});
  for (int64_t r = 0; r < ranks_; ++r) {
    const Tensor rows = part(ranks, r);
    for (const bool second : {false, true}) {
      const Tensor here = rows.slice(1, second ? chunk : 0, chunk),
                   there = full.slice(1, (second ? 2 * ranks_ - 1 - r : r) * chunk, chunk);
      back ? copy_matrix(there, here) : copy_matrix(here, there);
    }
  }
}

Tensor HeadExchange::heads_of(const Tensor& qkv) const {
  // Full groups: each rank gets consecutive columns.
  if (!replicates()) return heads_of_output(qkv);
  const int64_t d = all_.head_dim, queries = mine_.heads_per_group * d;
  const Tensor parts = Tensor::empty(qkv.device(), {ranks_ * qkv.size(0), mine_.row()}, qkv.dtype());
  for (int64_t r = 0; r < ranks_; ++r) {
    const Tensor to = part(parts, r);
    copy_matrix(qkv.slice(1, all_.query(r * mine_.heads_per_group), queries), to.slice(1, 0, queries));
    copy_matrix(qkv.slice(1, all_.key(r / copies_), 2 * d), to.slice(1, queries, 2 * d));
  }
  const Tensor received = exchange(parts, kToHeads);
  reorder(received, parts, false);
  return parts;
}

Tensor HeadExchange::rows_of(const Tensor& dqkv, DType type) const {
  CAPSTAN_ASSERT(replicates() || dqkv.dtype() == type, "nothing to sum in " + dqkv.text());
  if (!replicates()) return rows_of_output(dqkv);
  const int64_t rows = batch_ * seq_, d = all_.head_dim, queries = mine_.heads_per_group * d;
  Device& device = dqkv.device();
  const Tensor parts = workspace(device, dqkv.shape(), dqkv.dtype());
  reorder(parts, dqkv, true);
  const Tensor received = exchange(parts, kToRows), all = Tensor::empty(device, {rows, all_.row()}, type);
  for (int64_t r = 0; r < ranks_; ++r)
    copy_matrix(part(received, r).slice(1, 0, queries),
                all.slice(1, all_.query(r * mine_.heads_per_group), queries));
  const Tensor copies = workspace(device, {copies_ * rows, 2 * d}, dqkv.dtype()),
               sum = workspace(device, {rows, 2 * d}, type);
  for (int64_t g = 0; g < all_.groups; ++g) {
    for (int64_t c = 0; c < copies_; ++c)
      copy_matrix(part(received, g * copies_ + c).slice(1, queries, 2 * d), copies.slice(0, c * rows, rows));
    launch(device, device.table().elementwise->sum_parts, copies, copies_, sum, sum.elements());
    copy_matrix(sum, all.slice(1, all_.key(g), 2 * d));
  }
  return all;
}

Tensor HeadExchange::rows_of_output(const Tensor& out) const {
  if (is_single()) return out;
  const int64_t rows = batch_ * seq_, width = out.size(1);
  const Tensor parts = workspace(out.device(), out.shape(), out.dtype());
  reorder(parts, out, true);
  const Tensor received = exchange(parts, kToRows),
               all = Tensor::empty(out.device(), {rows, ranks_ * width}, out.dtype());
  for (int64_t r = 0; r < ranks_; ++r) copy_matrix(part(received, r), all.slice(1, r * width, width));
  return all;
}

Tensor HeadExchange::heads_of_output(const Tensor& dout) const {
  if (is_single()) return dout;
  const int64_t rows = dout.size(0), width = dout.size(1) / ranks_;
  const Tensor parts = Tensor::empty(dout.device(), {ranks_ * rows, width}, dout.dtype());
  for (int64_t r = 0; r < ranks_; ++r) copy_matrix(dout.slice(1, r * width, width), part(parts, r));
  const Tensor received = exchange(parts, kToHeads);
  reorder(received, parts, false);
  return parts;
}

Tensor HeadExchange::gathered(const Tensor& per_row) const {
  if (is_single() || !per_row.defined()) return per_row;
  const int64_t rows = batch_ * seq_;
  const Tensor received = workspace(per_row.device(), {ranks_ * rows, 1}, per_row.dtype()),
               natural = Tensor::empty(per_row.device(), {ranks_ * rows, 1}, per_row.dtype());
  group_->channel().start(comm::TransferBatch("values per row").all_gather(per_row, received)).wait();
  reorder(received, natural, false);
  return natural.view({ranks_ * rows});
}

}  // namespace capstan::ops

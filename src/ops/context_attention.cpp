#include "ops/context_attention.hpp"

#include <optional>

#include "base/error.hpp"
#include "comm/channel.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/cast.hpp"
#include "ops/head_exchange.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

// One call: heads are exchanged within `heads`, keys and values over `keys`. Either may have one rank.
struct Plan {
  HeadExchange heads;
  // Ranks over which keys are exchanged. Null: this rank has all keys.
  comm::Communicator* keys;
  // all-gather of the keys; else a ring.
  bool gather;
  // Length of a full sequence.
  int64_t seq;
  // Shape for this rank's rows and heads after the exchange.
  kernels::AttentionShape shape;

  Plan(const AttentionOptions& options, const ContextParallel& context)
      : heads(context.exchange == ContextExchange::a2a       ? context.group
              : context.exchange == ContextExchange::a2a_p2p ? context.inner
                                                             : nullptr,
              options.layout, options.shape.batch, options.shape.seq),
        keys(context.exchange == ContextExchange::a2a       ? nullptr
             : context.exchange == ContextExchange::a2a_p2p ? context.outer
                                                            : context.group),
        gather(context.exchange == ContextExchange::all_gather),
        seq(options.shape.seq * context.size()),
        shape(options.shape) {
    if (keys && keys->is_single()) keys = nullptr;
    shape.groups = layout().groups;
    shape.heads_per_group = layout().heads_per_group;
    shape.seq = heads.seq();
    shape.head_offset += heads.first_head();
  }
  // Layout of packed QKV after the exchange of heads, and of keys and values alone: packed QKV without query
  // heads.
  const kernels::QkvLayout& layout() const { return heads.layout(); }
  kernels::QkvLayout kv_layout() const { return {layout().groups, 0, layout().head_dim}; }
  Heads outputs(const Tensor& x) const { return output_heads(x, layout(), shape.v_dim); }
  int64_t rows() const { return shape.batch * shape.seq; }
  int ranks() const { return keys ? keys->size() : 1; }
  int previous(int step) const { return (keys->rank() + keys->size() - step) % keys->size(); }
  // This rank's queries and the keys of rank `source`.
  kernels::AttentionBlock part(int source) const {
    return {shape, context_rows(keys->size(), keys->rank(), seq), context_rows(keys->size(), source, seq)};
  }
  // Elements of a row of keys and values.
  int64_t kv_row() const { return kv_layout().row(); }
};

// The key and value heads of packed rows, as a matrix with a row for each group of each token.
Tensor key_columns(const Tensor& packed, const kernels::QkvLayout& layout) {
  const int64_t d = layout.head_dim, group = (layout.heads_per_group + 2) * d;
  return packed.view({packed.size(0) * layout.groups, group}).slice(1, layout.heads_per_group * d, 2 * d);
}

// The purposes of transfers.
constexpr std::string_view kKeys = "keys of context attention",
                           kGradients = "gradients of keys of context attention";

using Block = std::function<void(int step, int source, const Tensor& kv)>;

// Calls `block` with the keys and values of every rank: this rank first, then the preceding ranks. A ring
// transfers the next ones while `block` runs.
void for_each_block(StepContext& context, const Plan& plan, const Tensor& qkv, const Block& block) {
  comm::Communicator& group = *plan.keys;
  Device& device = context.device;
  const auto empty = [&](int64_t ranks) {
    CategoryScope scope(MemoryCategory::workspace);
    return Tensor::empty(device, {ranks * plan.rows(), plan.kv_row()}, qkv.dtype());
  };
  Tensor current = empty(1);
  copy_matrix(key_columns(qkv, plan.layout()),
              current.view({plan.rows() * plan.layout().groups, 2 * plan.layout().head_dim}));
  if (plan.gather) {
    const Tensor all = empty(plan.ranks());
    traced(context, 'C', "context_attention gather keys",
           [&] { group.channel().start(comm::TransferBatch(kKeys).all_gather(current, all)).wait(); });
    for (int step = 0; step < plan.ranks(); ++step) {
      const int source = plan.previous(step);
      block(step, source, all.slice(0, source * plan.rows(), plan.rows()));
    }
    return;
  }
  for (int step = 0; step < plan.ranks(); ++step) {
    if (step + 1 == plan.ranks()) {
      block(step, plan.previous(step), current);
      return;
    }
    const Tensor next = empty(1);
    TraceScope sending(context, 'C', "context_attention send keys");
    comm::PendingTransfers transfers = group.channel().start(comm::TransferBatch(kKeys)
                                                                 .receive(next, comm::previous_in(group))
                                                                 .send(current, comm::next_in(group)));
    block(step, plan.previous(step), current);
    transfers.wait();
    sending.end();
    current = next;
  }
}

// Attention of this rank's queries over the keys of all ranks: out fp32 and lse.
void forward(StepContext& context, const Plan& plan, const Tensor& qkv, const Documents& documents,
             const Tensor& dropout_rows, const Tensor& out, const Tensor& lse) {
  Device& device = context.device;
  const kernels::ContextAttention& kernel = *device.table().context_attention;
  for_each_block(context, plan, qkv, [&](int step, int source, const Tensor& kv) {
    const kernels::AttentionBlock part = plan.part(source);
    if (step > 0 && !part.attends_to_any()) return;
    traced(context, 'F', "context_attention block", [&] {
      const QkvHeads x = packed_heads(qkv, plan.layout()), keys = packed_heads(kv, plan.kv_layout());
      launch(device, kernel.forward_workspace(part, documents.count()), kernel.forward, part, x.q, keys.k,
             keys.v, documents, dropout_rows, step > 0, plan.outputs(out), lse);
    });
  });
}

// Sums the gradients of keys and values over the ranks whose queries used them. In a ring the gradients
// follow their keys one step behind: every rank adds its contribution, and the rank that holds the keys adds
// its own last.
class RotatingGradients {
 public:
  RotatingGradients(StepContext& context, const Plan& plan) : context_(context), plan_(plan) {}

  // This rank's contribution for the keys of the block, to be written before add().
  Tensor part(int step) {
    CategoryScope scope(MemoryCategory::workspace);
    Tensor made =
        packed_rows(context_.device, {plan_.rows(), plan_.kv_row()}, DType::f32, plan_.layout(), plan_.shape);
    if (step == 0) own_ = made;
    return made;
  }
  void add(int step, const Tensor& part) {
    if (step == 0) return;
    if (step > 1) add_arrived(part);
    comm::Communicator& group = *plan_.keys;
    {
      CategoryScope scope(MemoryCategory::workspace);
      arriving_ = Tensor::empty(context_.device, part.shape());
    }
    traced_.emplace(context_, 'C', "context_attention send gradients");
    transfers_ = group.channel().start(comm::TransferBatch(kGradients)
                                           .receive(arriving_, comm::previous_in(group))
                                           .send(part, comm::next_in(group)));
  }
  // The gradient of this rank's own keys and values, fp32 [rows, kv_row].
  Tensor finish() {
    add_arrived(own_);
    return own_;
  }

 private:
  void add_arrived(const Tensor& part) {
    transfers_.wait();
    traced_->end();
    launch(context_.device, context_.device.table().elementwise->add, arriving_, part, part, part.elements());
  }
  StepContext& context_;
  const Plan& plan_;
  Tensor own_, arriving_;
  comm::PendingTransfers transfers_;
  std::optional<TraceScope> traced_;
};

// The gradient of this rank's packed rows, fp32.
Tensor backward(StepContext& context, const Plan& plan, const Tensor& qkv, const Tensor& out,
                const Tensor& lse, const Tensor& dout, const Documents& documents,
                const Tensor& dropout_rows) {
  Device& device = context.device;
  const kernels::ContextAttention& kernel = *device.table().context_attention;
  Tensor dqkv = Tensor::zeros(device, qkv.shape());
  RotatingGradients in_flight(context, plan);
  // all-gather: this rank's contribution to all keys.
  Tensor all;
  if (plan.gather) {
    CategoryScope scope(MemoryCategory::workspace);
    all = packed_rows(device, {plan.ranks() * plan.rows(), plan.kv_row()}, DType::f32, plan.layout(),
                      plan.shape);
  }
  for_each_block(context, plan, qkv, [&](int step, int source, const Tensor& kv) {
    const kernels::AttentionBlock part = plan.part(source);
    const Tensor dkv = plan.gather ? all.slice(0, source * plan.rows(), plan.rows()) : in_flight.part(step);
    traced(context, 'B', "context_attention block", [&] {
      if (!part.attends_to_any()) return device.zero(dkv.address(), dkv.bytes());
      const QkvHeads x = packed_heads(qkv, plan.layout()), keys = packed_heads(kv, plan.kv_layout()),
                     dx = packed_heads(dqkv, plan.layout()), dkeys = packed_heads(dkv, plan.kv_layout());
      launch(device, kernel.backward_workspace(part, documents.count()), kernel.backward, part, x.q, keys.k,
             keys.v, plan.outputs(out), lse, plan.outputs(dout), documents, dropout_rows, dx.q, dkeys.k,
             dkeys.v);
    });
    if (!plan.gather) in_flight.add(step, dkv);
  });
  Tensor dkv;
  if (plan.gather) {
    traced(context, 'C', "context_attention scatter gradients",
           [&] { comm::reduce_scatter_sum(*plan.keys, all, kGradients); });
    dkv = all.slice(0, plan.keys->rank() * plan.rows(), plan.rows());
  } else {
    dkv = in_flight.finish();
  }
  copy_matrix(dkv.view({plan.rows() * plan.layout().groups, 2 * plan.layout().head_dim}),
              key_columns(dqkv, plan.layout()));
  return dqkv;
}

struct SentBytes {
  double forward = 0, backward = 0;
};
// The traffic formulas of the header.
SentBytes sent_bytes(const Plan& plan, const AttentionOptions& options, DType type) {
  const auto bytes = static_cast<double>(size_of(type));
  const double rows = static_cast<double>(options.shape.batch * options.shape.seq),
               others = static_cast<double>(plan.heads.ranks() - 1);
  const auto row = static_cast<double>(plan.layout().row()),
             out = static_cast<double>(plan.layout().heads() * plan.shape.v_dim);
  SentBytes sent;
  sent.forward = others * rows *
                 ((row + out) * bytes + (options.documents.start.defined() ? 4 : 0) +
                  (options.shape.dropout > 0 ? 8 : 0));
  sent.backward = others * rows * (out * bytes + row * (plan.heads.replicates() ? 4 : bytes));
  const double kv = static_cast<double>(plan.ranks() - 1) * static_cast<double>(plan.rows() * plan.kv_row());
  sent.forward += kv * bytes;
  sent.backward += kv * (bytes + 4);
  return sent;
}

// Packed QKV with transformed queries and keys: in place where it may, else a copy.
Tensor transformed_packed(StepContext& context, const Tensor& qkv, const AttentionOptions& options,
                          bool in_place) {
  const kernels::QkvLayout& layout = options.layout;
  if (options.transform.is_identity()) return qkv;
  const QkvHeads from = packed_heads(qkv, layout);
  if (in_place) {
    options.transform.apply(context, layout, from, from);
    return qkv;
  }
  Device& device = context.device;
  Tensor y = Tensor::empty(device, qkv.shape(), qkv.dtype());
  const QkvHeads to = packed_heads(y, layout);
  options.transform.apply(context, layout, from, to);
  launch(device, device.table().elementwise->copy_rows, from.v.first, layout.strides().group, to.v.first,
         layout.strides().group, qkv.size(0) * layout.groups, layout.head_dim);
  return y;
}

}  // namespace

Var context_attention(Tape& tape, Var qkv, const AttentionOptions& options, const ContextParallel& context) {
  if (context.size() == 1) return attention(tape, std::move(qkv), options);
  const int64_t rows = qkv.size(0);
  CAPSTAN_ASSERT(qkv.value.is_contiguous() && rows == options.shape.batch * options.shape.seq &&
                     qkv.size(1) == options.layout.row(),
                 "context_attention: qkv " + qkv.value.text());
  options.transform.check(qkv.value, options.layout);
  CAPSTAN_ASSERT(!options.documents.start.defined() || options.documents.start.elements() == rows,
                 "context_attention: document starts " + options.documents.start.text());
  CAPSTAN_ASSERT(
      options.shape.dropout == 0 ||
          (options.dropout_rows.defined() && options.dropout_rows.elements() == rows),
      "context_attention: dropout needs the dropout row indices, got " + options.dropout_rows.text());
  CAPSTAN_ASSERT(
      context.exchange != ContextExchange::a2a_p2p ||
          (context.inner && context.outer &&
           context.inner->size() * context.outer->size() == context.group->size() &&
           context.outer->rank() * context.inner->size() + context.inner->rank() == context.group->rank()),
      "context_attention: a2a_p2p needs inner groups of adjacent ranks");
  static_cast<void>(context_rows(context.size(), context.group->rank(), options.shape.seq * context.size()));
  const Plan plan(options, context);
  Device& device = tape.device();
  const DType type = qkv.dtype();

  const bool in_place = transforms_in_place(qkv.value, options.transform);
  // Only the norm's backward pass reads the untransformed qkv.
  const Tensor before = options.transform.normalizes() ? qkv.value : Tensor();
  const Tensor ready = transformed_packed(tape.context(), qkv.value, options, in_place);
  const Tensor packed = plan.heads.heads_of(ready),
               document_start = plan.heads.gathered(options.documents.start),
               dropout_rows =
                   plan.heads.gathered(options.shape.dropout > 0 ? options.dropout_rows : Tensor());
  const int64_t width = plan.shape.heads() * plan.shape.v_dim;
  const Tensor lse = Tensor::empty(device, {options.shape.batch, plan.shape.heads(), plan.shape.seq});
  const Documents documents{document_start, options.documents.cu_seqlens, options.documents.max_seqlen};
  Tensor attended;
  if (plan.keys) {
    std::optional<CategoryScope> scope;
    if (type != DType::f32) scope.emplace(MemoryCategory::workspace);
    const Tensor wide = Tensor::empty(device, {plan.rows(), width});
    scope.reset();
    forward(tape.context(), plan, packed, documents, dropout_rows, wide, lse);
    options.sink.apply(tape.context(), plan.shape, plan.heads.first_head(), plan.outputs(wide), lse);
    attended = converted(wide, type);
  } else {
    attended = Tensor::empty(device, {plan.rows(), width}, type);
    const QkvHeads x = packed_heads(packed, plan.layout());
    const kernels::Attention& kernel = *device.table().attention;
    launch(device, kernel.forward_workspace(plan.shape, packed.dtype(), documents.count()), kernel.forward,
           plan.shape, x.q, x.k, x.v, documents, dropout_rows, plan.outputs(attended), lse);
    options.sink.apply(tape.context(), plan.shape, plan.heads.first_head(), plan.outputs(attended), lse);
  }
  const Tensor out = plan.heads.rows_of_output(attended);

  const double flops = attention_flops(options, plan.seq);
  const auto touched = static_cast<double>(qkv.value.bytes() + out.bytes());
  const double prepared = options.transform.cost(options.layout, qkv.value.bytes()).bytes,
               undone = options.transform.backward_cost(options.layout, qkv.value.bytes()).bytes;
  const SentBytes sent = sent_bytes(plan, options, type);
  return tape.record(
      {.name = "context_attention",
       .inputs = {std::move(qkv)},
       .outputs = {out},
       .parameters = options.parameters(),
       .cost = {flops, touched + prepared, sent.forward},
       .backward_cost = {2 * flops, 2 * touched + undone, sent.backward},
       .saved = {packed, attended, lse, document_start, dropout_rows, before},
       .backward = [plan, options](BackwardContext& ctx) {
         Device& dev = ctx.device();
         const Tensor &kept = ctx.saved(0), &starts = ctx.saved(3), &rows_of_dropout = ctx.saved(4);
         const DType compute = kept.dtype();
         const Tensor dout = plan.heads.heads_of_output(ctx.output_gradient());
         const Documents packing{starts, options.documents.cu_seqlens, options.documents.max_seqlen};
         const DType wanted = plan.heads.replicates() ? DType::f32 : compute;
         Tensor dqkv;
         if (plan.keys) {
           dqkv = converted(backward(ctx.context(), plan, kept, ctx.saved(1), ctx.saved(2), dout, packing,
                                     rows_of_dropout),
                            wanted);
         } else {
           dqkv = packed_rows(dev, kept.shape(), wanted, plan.layout(), plan.shape);
           const QkvHeads x = packed_heads(kept, plan.layout()), dx = packed_heads(dqkv, plan.layout());
           const kernels::Attention& kernel = *dev.table().attention;
           launch(dev, kernel.backward_workspace(plan.shape, kept.dtype(), packing.count()), kernel.backward,
                  plan.shape, x.q, x.k, x.v, plan.outputs(ctx.saved(1)), ctx.saved(2), plan.outputs(dout),
                  packing, rows_of_dropout, dx.q, dx.k, dx.v);
         }
         const Tensor mine = plan.heads.rows_of(dqkv, compute);
         options.transform.backward(ctx, options.layout, ctx.saved(5), mine);
         options.sink.backward(ctx, plan.shape, plan.heads.first_head(), plan.outputs(ctx.saved(1)),
                               ctx.saved(2), plan.outputs(dout));
         ctx.accumulate_gradient(0, mine);
       }})[0];
}

}  // namespace capstan::ops

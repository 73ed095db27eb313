#include "nn/token_dispatcher.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/channel.hpp"
#include "ops/row_exchange.hpp"

namespace capstan::nn {

namespace {

using Options = TokenDispatcher::Options;

// tokens: those that are dispatched together. [first, first + experts): the experts that get rows.
ops::PermutationOptions permutation_options(const Options& o, int64_t tokens, int64_t first,
                                            int64_t experts) {
  return {
      .first_expert = first,
      .experts = experts,
      .capacity = o.capacity_factor ? ops::expert_capacity(tokens, o.topk, o.experts, *o.capacity_factor) : 0,
      .policy = o.drop_policy,
      .pad_to_capacity = o.pad_to_capacity};
}

// Dropout row indices i64 [N] as rows that the operations of rows copy, fp32 [N, 2] with the same bits, and
// back. The halves of an index, a sample's number times 2^24 plus a position, are the bits of finite numbers
// for sequences below 2^23 tokens and samples below 2^38.
Tensor rows_of_indices(const Tensor& indices) {
  return indices.defined() ? indices.as_type(DType::f32).view({indices.size(0), 2}) : Tensor();
}
Tensor indices_of_rows(const Tensor& rows) {
  return rows.view({rows.size(0) * 2}).as_type(DType::i64);
}

// ---- allgather

std::string of_layer(const char* what, const Options& options) {
  return what + (" of layer " + std::to_string(options.layer));
}

// Rows [N, any] of the tokens of all ranks.
Tensor gather_tokens(const StepContext& context, const Tensor& local, const ops::TensorParallel& ranks,
                     const char* what, const Options& options) {
  if (!ranks.shards_rows() || !local.defined()) return local;
  Tensor all = Tensor::empty(context.device, {ranks.size() * local.size(0), local.size(1)}, local.dtype());
  traced(context, 'C', std::string("gather of ") + what, [&] {
    ranks.group->channel().start(comm::TransferBatch(of_layer(what, options)).all_gather(local, all)).wait();
  });
  return all;
}

class GatheredTokens final : public TokenDispatch {
 public:
  // dropout_rows: rows_of_indices() of all ranks.
  GatheredTokens(const Options& options, const ops::TensorParallel& ranks, Var x, Var probabilities,
                 ops::ExpertPermutation order, Tensor dropout_rows)
      : options_(options),
        ranks_(ranks),
        x_(std::move(x)),
        probabilities_(std::move(probabilities)),
        order_(std::move(order)),
        dropout_rows_(std::move(dropout_rows)) {}

  ExpertInput receive(Tape& tape) override {
    ExpertInput input{.rows = ops::permute(tape, x_, order_),
                      .weights = {},
                      .order = order_,
                      .dropout_rows = {},
                      .expected_rows = std::max<int64_t>(
                          1, x_.size(0) * options_.topk * order_.experts / options_.experts)};
    if (options_.weights_activations)
      input.weights = ops::permute_probabilities(tape, probabilities_, order_);
    if (dropout_rows_.defined())
      input.dropout_rows = indices_of_rows(ops::permute(tape, Var{dropout_rows_}, order_).value);
    x_ = Var();
    return input;
  }
  Var combine(Tape& tape, const Var& outputs) override {
    const Var y =
        ops::unpermute(tape, outputs, order_, options_.weights_activations ? Var() : probabilities_);
    return ops::reduce_from_tensor_parallel(tape, y, ranks_, of_layer("outputs of experts", options_));
  }

 private:
  const Options& options_;
  ops::TensorParallel ranks_;
  // The hidden states and probabilities of all ranks' tokens.
  Var x_, probabilities_;
  ops::ExpertPermutation order_;
  Tensor dropout_rows_;
};

class AllGatherDispatcher final : public TokenDispatcher {
 public:
  AllGatherDispatcher(const Parallel& parallel, const Options& options)
      : options_(options),
        ranks_{parallel.experts.expert_tensor, parallel.tensor.is_single() || parallel.tensor.shards_rows()},
        expert_(parallel.shard_ranks().expert),
        counts_dropped_(parallel.shard_ranks().expert_tensor.rank == 0) {}

  std::unique_ptr<TokenDispatch> start(Tape& tape, const Var& local, const ops::Routing& routing,
                                       const Tensor& dropout_rows, const Tensor& dropped) const override {
    Var x = ops::copy_to_tensor_parallel(tape, local, ranks_, of_layer("inputs of experts", options_));
    Var probabilities = ops::copy_to_tensor_parallel(tape, routing.probabilities, ranks_,
                                                     of_layer("probabilities", options_));
    const int64_t here = options_.experts / expert_.size;
    const Tensor experts = tape.choice(
        [&] { return gather_tokens(tape.context(), routing.experts, ranks_, "chosen experts", options_); });
    const ops::PermutationOptions permutation =
        permutation_options(options_, x.size(0), expert_.rank * here, here);
    ops::ExpertPermutation order = ops::plan_permutation(tape, experts, probabilities.value, permutation);
    if (dropped.defined() && counts_dropped_) ops::count_dropped(experts, permutation, order, dropped);
    // Gathered once: a recomputed region uses the indices of the first pass again.
    const Tensor indices = tape.choice([&] {
      return gather_tokens(tape.context(), rows_of_indices(dropout_rows), ranks_, "dropout row indices",
                           options_);
    });
    return std::make_unique<GatheredTokens>(options_, ranks_, std::move(x), std::move(probabilities),
                                            std::move(order), indices);
  }

 private:
  const Options options_;
  // The ranks that gather tokens; rows are sharded over them unless tensor-parallel ranks have the same.
  const ops::TensorParallel ranks_;
  const ShardRanks::AxisRank expert_;
  // Ranks that share the tensors of the same experts have the same tokens; one of them counts.
  const bool counts_dropped_;
};

// ---- alltoall

// The setup that a layer's transfers share.
struct ExchangeSetup {
  Options options;
  ops::ExpertParallel ranks;

  int64_t experts_here() const { return options.experts / comm::ranks_of(ranks.expert); }
  bool gathers() const { return comm::ranks_of(ranks.tensor) > 1; }
  std::string purpose(const char* what) const { return of_layer(what, options); }
};

class ExchangedTokens final : public TokenDispatch {
 public:
  ExchangedTokens(Tape& tape, const ExchangeSetup& setup, const Var& x, const ops::Routing& routing,
                  const Tensor& dropout_rows, const Tensor& dropped)
      : setup_(setup), probabilities_(routing.probabilities) {
    const Options& o = setup.options;
    const ops::PermutationOptions options = permutation_options(o, x.size(0), 0, o.experts);
    tokens_ = ops::plan_permutation(tape, routing.experts, probabilities_.value, options);
    if (dropped.defined()) ops::count_dropped(routing.experts, options, tokens_, dropped);
    const Tensor sizes = tokens_.sizes();
    counts_ = o.pad_to_capacity
                  ? ops::equal_counts(sizes, options.capacity, setup.ranks)
                  : ops::exchange_counts(tape, sizes, tokens_.rows, setup.ranks, setup.purpose("experts"));
    trim_to(ops::total(counts_.exchanged.sent));
    order_ = ops::regroup_permutation(tape, counts_.of_experts, ops::total(counts_.gathered));
    rows_.emplace(tape, ops::permute(tape, x, tokens_), counts_.exchanged, *setup.ranks.expert,
                  setup.purpose("rows of the experts"));
    if (o.weights_activations)
      weights_.emplace(tape, ops::permute_probabilities(tape, probabilities_, tokens_), counts_.exchanged,
                       *setup.ranks.expert, setup.purpose("probabilities"));
    if (dropout_rows.defined())
      dropout_rows_.emplace(tape, ops::permute(tape, Var{rows_of_indices(dropout_rows)}, tokens_),
                            counts_.exchanged, *setup.ranks.expert, setup.purpose("dropout row indices"));
  }

  ExpertInput receive(Tape& tape) override {
    ExpertInput input{.rows = rows_->wait(tape), .weights = {}, .order = order_, .dropout_rows = {}};
    if (weights_) input.weights = weights_->wait(tape);
    Var dropout_rows = dropout_rows_ ? dropout_rows_->wait(tape) : Var();
    if (setup_.gathers()) {
      input.rows = ops::gather_rows(tape, input.rows, counts_.gathered, *setup_.ranks.tensor,
                                    setup_.purpose("rows of the experts"));
      if (weights_)
        input.weights = ops::gather_rows(tape, input.weights, counts_.gathered, *setup_.ranks.tensor,
                                         setup_.purpose("probabilities"));
      if (dropout_rows_)
        dropout_rows = ops::gather_rows(tape, dropout_rows, counts_.gathered, *setup_.ranks.tensor,
                                        setup_.purpose("dropout row indices"));
    }
    if (sorts()) {
      input.rows = ops::permute(tape, input.rows, order_);
      if (weights_) input.weights = ops::permute_probabilities(tape, input.weights, order_);
      if (dropout_rows_) dropout_rows = ops::permute(tape, dropout_rows, order_);
    }
    if (dropout_rows_) input.dropout_rows = indices_of_rows(dropout_rows.value);
    return input;
  }

  Var combine(Tape& tape, const Var& outputs) override {
    Var y = sorts() ? ops::unpermute(tape, outputs, order_) : outputs;
    const std::string purpose = setup_.purpose("outputs of the experts");
    if (setup_.gathers()) y = ops::reduce_rows(tape, y, counts_.gathered, *setup_.ranks.tensor, purpose);
    y = ops::exchange_rows(tape, y, counts_.exchanged.reversed(), *setup_.ranks.expert, purpose);
    return ops::unpermute(tape, y, tokens_, setup_.options.weights_activations ? Var() : probabilities_);
  }

 private:
  // The host knows the number of rows: those beyond it, which dropped tokens leave, need no memory.
  void trim_to(int64_t rows) {
    tokens_.rows = rows;
    tokens_.slot_of_row = tokens_.slot_of_row.flat_range(0, rows, {rows});
  }
  // The rows of one expert are in its order as they arrive.
  bool sorts() const { return setup_.experts_here() > 1; }

  const ExchangeSetup& setup_;
  Var probabilities_;
  // The order of this rank's tokens by expert, over all experts.
  ops::ExpertPermutation tokens_;
  ops::ExpertRows counts_;
  // The order of the received rows by expert, over the experts of this rank.
  ops::ExpertPermutation order_;
  std::optional<ops::RowExchange> rows_, weights_, dropout_rows_;
};

class AllToAllDispatcher final : public TokenDispatcher {
 public:
  AllToAllDispatcher(const Parallel& parallel, const Options& options) : setup_{options, parallel.experts} {}

  std::unique_ptr<TokenDispatch> start(Tape& tape, const Var& x, const ops::Routing& routing,
                                       const Tensor& dropout_rows, const Tensor& dropped) const override {
    return std::make_unique<ExchangedTokens>(tape, setup_, x, routing, dropout_rows, dropped);
  }

 private:
  const ExchangeSetup setup_;
};

}  // namespace

std::unique_ptr<TokenDispatcher> make_token_dispatcher(TokenDispatcher::Kind kind, const Parallel& parallel,
                                                       const TokenDispatcher::Options& options) {
  if (kind == TokenDispatcher::Kind::alltoall && comm::ranks_of(parallel.experts.expert) > 1)
    return std::make_unique<AllToAllDispatcher>(parallel, options);
  return std::make_unique<AllGatherDispatcher>(parallel, options);
}

}  // namespace capstan::nn

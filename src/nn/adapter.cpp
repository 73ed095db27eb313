#include "nn/adapter.hpp"

#include <cmath>

#include "nn/initialize.hpp"
#include "ops/grouped_linear.hpp"
#include "ops/linear.hpp"

namespace capstan::nn {

namespace {

Init initial_values(AdapterOptions::InitialValues kind, int64_t out, int64_t in) {
  switch (kind) {
    case AdapterOptions::InitialValues::xavier:
      return {Init::Kind::uniform, std::sqrt(6.0 / static_cast<double>(in + out))};
    // With a = sqrt(5), as PyTorch's linear layers.
    case AdapterOptions::InitialValues::kaiming:
      return {Init::Kind::uniform, 1.0 / std::sqrt(static_cast<double>(in))};
    case AdapterOptions::InitialValues::normal:
      return {Init::Kind::normal, 0.02};
    case AdapterOptions::InitialValues::zero:
      break;
  }
  return {Init::Kind::zeros};
}

// The axis over which the width of a layer is sharded.
ShardingAxis width_axis(ParameterGrid grid) {
  return grid == ParameterGrid::expert ? ShardingAxis::expert_tensor : ShardingAxis::tensor;
}

}  // namespace

Adapter::Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight,
                 LinearSharding sharding, const std::vector<OutputSlice>& slices)
    : options_(parameters.adapters()),
      weight_(weight),
      parallel_(parameters.parallel().tensor),
      of_experts_(weight.spec().grid() == ParameterGrid::expert),
      width_(parameters.parallel().shard_ranks().of(width_axis(weight.spec().grid()))),
      sharding_(sharding) {
  if (!options_) return;
  if (options_->split_fused && !slices.empty()) {
    const std::string around = path.prefix.substr(0, path.prefix.rfind('.') + 1);
    for (const OutputSlice& slice : slices) {
      ModulePath own = path;
      own.prefix = around + slice.name;
      if (options_->adapts(own.prefix)) add_branch(parameters, own, slice);
    }
    return;
  }
  if (!options_->adapts(path.prefix)) return;
  add_branch(parameters, path,
             {{},
              {},
              weight.spec().shape[weight.spec().shape.rank() - 2],
              sharding == LinearSharding::column ? weight.spec().sharding : Sharding{}});
}

void Adapter::add_branch(ParamList& parameters, const ModulePath& path, const OutputSlice& slice) {
  CAPSTAN_ASSERT(!of_experts_ || !options_->magnitudes,
                 "magnitudes of the experts `" + weight_.name() + "`, which the rules refuse");
  const Shape& weight_shape = weight_.spec().shape;
  const int64_t in = weight_shape[weight_shape.rank() - 1], rank = options_->rank;
  const ModulePath inner = path.inside("adapter");
  const auto factor = [&](const char* name, int64_t rows, int64_t columns,
                          AdapterOptions::InitialValues values) {
    const Shape shape = of_experts_ ? Shape{weight_shape[0], rows, columns} : Shape{rows, columns};
    ParamSpec spec = inner.spec(name, shape, initial_values(values, rows, columns));
    if (of_experts_) spec.sharding = {ShardingAxis::expert, 0};
    spec.adapter = true;
    return spec;
  };
  ParamSpec a = factor("linear_in.weight", rank, in, options_->a),
            b = factor("linear_out.weight", slice.out, rank, options_->b);
  b.is_lora_b = true;
  // A replicated factor gets gradients from each rank's outputs, inputs or rows only.
  switch (sharding_) {
    case LinearSharding::none:
      a.partial_over_tensor = b.partial_over_tensor = parallel_.shards_rows();
      break;
    case LinearSharding::column:
      b.sharding = slice.sharding;
      a.partial_over_tensor = width_.size > 1;
      break;
    case LinearSharding::row:
      a.sharding = weight_.spec().sharding;
      b.partial_over_tensor = width_.size > 1;
      break;
  }
  // The update is in the parallel state of the output to which it is added: a partial sum where A is sharded
  // (over its inputs), some of the columns where B is.
  const ShardingAxis axis = width_axis(weight_.spec().grid());
  CAPSTAN_ASSERT(
      a.grid() == weight_.spec().grid() && b.grid() == a.grid() &&
          (width_.size == 1 || ((a.sharding.over(axis) != nullptr) == (sharding_ == LinearSharding::row) &&
                                (b.sharding.over(axis) != nullptr) == (sharding_ == LinearSharding::column))),
      "the update of `" + a.name + "` is sharded otherwise than the output of `" + weight_.name() + "`");
  const uint64_t dropout_sequence = random_sequence_of(a.name);
  const Parameter& first = parameters.add(std::move(a));
  branches_.push_back({&first, &parameters.add(std::move(b)), slice.segments, dropout_sequence});
  if (!options_->magnitudes) return;
  ParamSpec m = inner.spec("magnitude", {slice.out}, {Init::Kind::ones});
  m.adapter = true;
  m.row_norms_of = weight_.name();
  if (sharding_ == LinearSharding::column)
    m.sharding = slice.sharding;
  else
    m.partial_over_tensor =
        sharding_ == LinearSharding::row ? !parallel_.is_single() : parallel_.shards_rows();
  branches_.back().magnitude = &parameters.add(std::move(m));
}

Var Adapter::apply(Tape& tape, Var base, const Var& x, const TokenContext& context,
                   const RowsOfExperts* experts) const {
  const auto scale = static_cast<float>(options_->scale);
  const bool gathers = !experts && sharding_ == LinearSharding::column && parallel_.shards_rows(),
             reads_own_rows = gathers || sharding_ == LinearSharding::none;
  const Tensor& dropout_rows = experts          ? experts->dropout_rows
                               : reads_own_rows ? context.hidden_dropout_rows
                                                : context.dropout_rows;
  for (const Branch& branch : branches_) {
    // A row-parallel layer reads some of the columns.
    const int64_t first_column = sharding_ == LinearSharding::row ? width_.rank * x.size(1) : 0;
    const Var in = ops::dropout_columns(
        tape, x, context.adapter_dropout(options_->dropout, branch.dropout_sequence, dropout_rows),
        first_column);
    if (experts) {
      const Var low =
          ops::grouped_linear(tape, in, experts->sizes, *branch.a, nullptr, experts->expected_rows);
      base = ops::grouped_low_rank_add(tape, std::move(base), low, experts->sizes, *branch.b, scale,
                                       branch.segments.begin, experts->expected_rows);
      continue;
    }
    Var low = ops::linear(tape, in, *branch.a);
    // Multiplied before they are gathered: `rank` columns are sent, and the rank's own rows are saved.
    if (gathers)
      low = ops::copy_to_tensor_parallel(tape, low, parallel_, "low-rank input of " + weight_.name());
    base = ops::low_rank_add(tape, std::move(base), low, *branch.b, scale, branch.segments);
  }
  for (const Branch& branch : branches_)
    if (branch.magnitude)
      base = ops::magnitude(tape, std::move(base), weight_, *branch.a, *branch.b, *branch.magnitude, scale,
                            sharding_ == LinearSharding::row ? parallel_.group : nullptr, branch.segments);
  return base;
}

}  // namespace capstan::nn

#include "nn/adapter.hpp"

#include <cmath>

#include "nn/initialize.hpp"

namespace capstan::nn {

namespace {

Init first_values(AdapterOptions::InitialValues kind, int64_t out, int64_t in) {
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

}  // namespace

Adapter::Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight,
                 LinearSharding sharding, const std::vector<OutputSlice>& slices)
    : options_(parameters.adapters()),
      weight_(weight),
      parallel_(parameters.parallel().tensor),
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
              weight.spec().shape[0],
              sharding == LinearSharding::column ? weight.spec().sharding : Sharding{}});
}

void Adapter::add_branch(ParamList& parameters, const ModulePath& path, const OutputSlice& slice) {
  const int64_t in = weight_.spec().shape[1], rank = options_->rank;
  const ModulePath inner = path.inside("adapter");
  ParamSpec a = inner.spec("linear_in.weight", {rank, in}, first_values(options_->a, rank, in));
  ParamSpec b =
      inner.spec("linear_out.weight", {slice.out, rank}, first_values(options_->b, slice.out, rank));
  a.adapter = b.adapter = true;
  b.is_lora_b = true;
  // A replicated factor gets gradients from each rank's outputs, inputs or rows only.
  switch (sharding_) {
    case LinearSharding::none:
      a.partial_over_tensor = b.partial_over_tensor = parallel_.shards_rows();
      break;
    case LinearSharding::column:
      b.sharding = slice.sharding;
      a.partial_over_tensor = !parallel_.is_single();
      break;
    case LinearSharding::row:
      a.sharding = weight_.spec().sharding;
      b.partial_over_tensor = !parallel_.is_single();
      break;
  }
  // The update is in the parallel state of the output to which it is added: a partial sum where A is sharded
  // (over its inputs), some of the columns where B is.
  CAPSTAN_ASSERT(
      parallel_.is_single() || (a.sharding.over_tensor_ranks() == (sharding_ == LinearSharding::row) &&
                                b.sharding.over_tensor_ranks() == (sharding_ == LinearSharding::column)),
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

Var Adapter::apply(Tape& tape, Var base, const Var& x, const TokenContext& context) const {
  for (const Branch& branch : branches_) {
    // A row-parallel layer reads some of the columns, a replicated one may read some of the rows.
    const int64_t first_column = sharding_ == LinearSharding::row ? parallel_.rank() * x.size(1) : 0;
    const Var in = ops::dropout_columns(tape, x,
                                        context.adapter_dropout(options_->dropout, branch.dropout_sequence,
                                                                sharding_ == LinearSharding::none),
                                        first_column);
    base = ops::low_rank_add(tape, std::move(base), in, *branch.a, *branch.b,
                             static_cast<float>(options_->scale), branch.segments);
  }
  for (const Branch& branch : branches_)
    if (branch.magnitude)
      base = ops::magnitude(tape, std::move(base), weight_, *branch.a, *branch.b, *branch.magnitude,
                            static_cast<float>(options_->scale),
                            sharding_ == LinearSharding::row ? parallel_.group : nullptr, branch.segments);
  return base;
}

}  // namespace capstan::nn

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

Adapter::Adapter(ParamList& parameters, const ModulePath& path, const Parameter& weight, bool column,
                 const std::vector<OutputSlice>& slices)
    : options_(parameters.adapters()),
      weight_(weight),
      parallel_(parameters.parallel().tensor),
      column_(column) {
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
             {{}, {}, weight.spec().shape[0], column ? weight.spec().sharding : Sharding{}});
}

void Adapter::add_branch(ParamList& parameters, const ModulePath& path, const OutputSlice& slice) {
  const int64_t in = weight_.spec().shape[1], rank = options_->rank;
  const ModulePath inner = path.inside("adapter");
  ParamSpec a = inner.spec("linear_in.weight", {rank, in}, first_values(options_->a, rank, in));
  ParamSpec b =
      inner.spec("linear_out.weight", {slice.out, rank}, first_values(options_->b, slice.out, rank));
  a.adapter = b.adapter = true;
  b.is_lora_b = true;
  // The replicated factor gets gradients from each rank's outputs, or inputs, only.
  if (column_) {
    b.sharding = slice.sharding;
    a.partial_over_tensor = !parallel_.is_single();
  } else {
    a.sharding = weight_.spec().sharding;
    b.partial_over_tensor = !parallel_.is_single();
  }
  const uint64_t dropout_sequence = random_sequence_of(a.name);
  const Parameter& first = parameters.add(std::move(a));
  branches_.push_back({&first, &parameters.add(std::move(b)), slice.segments, dropout_sequence});
  if (!options_->magnitudes) return;
  ParamSpec m = inner.spec("magnitude", {slice.out}, {Init::Kind::ones});
  m.adapter = true;
  m.row_norms_of = weight_.name();
  if (column_)
    m.sharding = slice.sharding;
  else
    m.partial_over_tensor = !parallel_.is_single();
  branches_.back().magnitude = &parameters.add(std::move(m));
}

Var Adapter::apply(Tape& tape, Var base, const Var& x, const TokenContext& context) const {
  for (const Branch& branch : branches_) {
    const int64_t first_column = column_ ? 0 : parallel_.rank() * x.size(1);
    const Var in = ops::dropout_columns(
        tape, x, context.adapter_dropout(options_->dropout, branch.dropout_sequence), first_column);
    base = ops::low_rank_add(tape, std::move(base), in, *branch.a, *branch.b,
                             static_cast<float>(options_->scale), branch.segments);
  }
  for (const Branch& branch : branches_)
    if (branch.magnitude)
      base = ops::magnitude(tape, std::move(base), weight_, *branch.a, *branch.b, *branch.magnitude,
                            static_cast<float>(options_->scale), column_ ? nullptr : parallel_.group,
                            branch.segments);
  return base;
}

}  // namespace capstan::nn

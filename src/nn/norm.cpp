#include "nn/norm.hpp"

namespace capstan::nn {

Norm::Norm(ParamList& parameters, const Place& place, int64_t width, NormKind kind, Over over) : kind_(kind) {
  const ops::TensorParallel& parallel = parameters.parallel().tensor;
  const bool partial = over == Over::heads ? !parallel.alone() : parallel.cuts_rows();
  const auto add = [&](const char* name, Init::Kind init) {
    ParamSpec spec = place.spec(name, {width}, {init});
    spec.partial_over_tensor = partial;
    return &parameters.add(std::move(spec));
  };
  gamma_ = add("weight", kind.zero_centered_gamma ? Init::Kind::zeros : Init::Kind::ones);
  if (!kind.rms) beta_ = add("bias", Init::Kind::zeros);
}

}  // namespace capstan::nn

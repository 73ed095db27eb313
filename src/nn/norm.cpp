#include "nn/norm.hpp"

namespace capstan::nn {

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, Over over)
    : Norm(parameters, path, width, kind,
           over == Over::heads ? !parameters.parallel().tensor.alone()
                               : parameters.parallel().tensor.shards_rows(),
           {}) {}

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, const Sharding& cut)
    : Norm(parameters, path, width, kind, false, cut) {}

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, bool partial,
           const Sharding& cut)
    : kind_(kind) {
  const auto add = [&](const char* name, Init::Kind init) {
    ParamSpec spec = path.spec(name, {width}, {init});
    spec.partial_over_tensor = partial;
    spec.sharding = cut;
    return &parameters.add(std::move(spec));
  };
  gamma_ = add("weight", kind.zero_centered_gamma ? Init::Kind::zeros : Init::Kind::ones);
  if (!kind.rms) beta_ = add("bias", Init::Kind::zeros);
}

}  // namespace capstan::nn

#include "nn/norm.hpp"

namespace capstan::nn {

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, Input over)
    : Norm(parameters, path, width, kind,
           over == Input::heads ? !parameters.parallel().tensor.is_single()
                                : parameters.parallel().tensor.shards_rows(),
           {}) {}

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind,
           const Sharding& sharding)
    : Norm(parameters, path, width, kind, false, sharding) {}

Norm::Norm(ParamList& parameters, const ModulePath& path, int64_t width, NormKind kind, bool partial,
           const Sharding& sharding)
    : kind_(kind) {
  const auto add = [&](const char* name, Init::Kind init) {
    ParamSpec spec = path.spec(name, {width}, {init});
    spec.partial_over_tensor = partial;
    spec.sharding = sharding;
    return &parameters.add(std::move(spec));
  };
  gamma_ = add("weight", kind.zero_centered_gamma ? Init::Kind::zeros : Init::Kind::ones);
  if (!kind.rms) beta_ = add("bias", Init::Kind::zeros);
}

std::optional<Norm> optional_norm(ParamList& parameters, const ModulePath& path, int64_t width,
                                  const std::optional<NormKind>& kind) {
  return kind ? std::optional<Norm>(std::in_place, parameters, path, width, *kind) : std::nullopt;
}

}  // namespace capstan::nn

#include "nn/norm.hpp"

namespace capstan::nn {

Norm::Norm(ParamList& parameters, const Place& place, int64_t width, NormKind kind) : kind_(kind) {
  gamma_ = &parameters.add(
      place.spec("weight", {width}, {kind.zero_centered_gamma ? Init::Kind::zeros : Init::Kind::ones}));
  if (!kind.rms) beta_ = &parameters.add(place.spec("bias", {width}, {Init::Kind::zeros}));
}

}  // namespace capstan::nn

// The formulas of kernels/step_control.hpp.
#pragma once

namespace capstan::kernels {

// Of the gradients: their norm becomes `clip` where it is larger; 0: no clipping.
inline double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1.0;
}

}  // namespace capstan::kernels

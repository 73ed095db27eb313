// Gradient clipping, for all devices.
#pragma once

namespace capstan::kernels {

// Returns the factor that scales gradients of this norm down to `clip`; 1 if the norm is not larger or `clip`
// is 0.
inline double clip_factor(double norm, double clip) {
  return clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1.0;
}

}  // namespace capstan::kernels

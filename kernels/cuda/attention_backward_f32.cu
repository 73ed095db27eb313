#include "kernels/cuda/attention_backward.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

template void launch_backward<float>(Context&, const BackwardCall&);

}  // namespace capstan::kernels::CAPSTAN_GPU

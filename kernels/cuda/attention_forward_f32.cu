#include "kernels/cuda/attention_forward.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

template void launch_forward<float>(Context&, const ForwardCall&);

}  // namespace capstan::kernels::CAPSTAN_GPU

#include "kernels/cuda/attention_backward.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

template void launch_backward<bf16>(Context&, const BackwardCall&);

}  // namespace capstan::kernels::CAPSTAN_GPU

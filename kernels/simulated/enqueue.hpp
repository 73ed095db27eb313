// Work of kernels in the order of their stream.
#pragma once

#include <functional>

#include "tensor/kernel_context.hpp"

namespace capstan::kernels::simulated {

// Runs work(context) after what is queued on the context's stream, which is a HostStream (an error is one of
// its queue); at once where there is no stream. The work keeps nothing by reference but device memory.
void enqueue_work(Context& context, std::function<void(Context&)> work);

}  // namespace capstan::kernels::simulated

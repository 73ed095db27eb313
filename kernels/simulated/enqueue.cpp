#include "kernels/simulated/enqueue.hpp"

#include <utility>

#include "tensor/host_stream.hpp"

namespace capstan::kernels::simulated {

void enqueue_work(Context& context, std::function<void(Context&)> work) {
  if (!context.stream) return work(context);
  static_cast<HostStream*>(context.stream)->enqueue([context, work = std::move(work)] { work(context); });
}

}  // namespace capstan::kernels::simulated

#include "train/trainer/device_setup.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/table.hpp"

namespace capstan::train {

void check_device(config::DeviceKind kind) {
  if (kind == config::DeviceKind::cuda)
    fail(ErrorCode::unsupported, "train.device: cuda: this build has no CUDA backend",
         "train.device=cpu trains here; recipes for GPUs can be checked and shown without one");
  if (kind == config::DeviceKind::meta)
    fail(ErrorCode::unsupported,
         "train.device: meta: it has shapes and no memory, so that nothing could be learned",
         "train.device=cpu");
}

int threads_per_rank(int64_t threads, int local_ranks) {
  return threads > 0 ? static_cast<int>(threads) : std::max(1, available_cores() / local_ranks);
}

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks) {
  check_device(kind);
  const int count = threads_per_rank(threads, local_ranks);
  if (kind == config::DeviceKind::checked) return make_checked_device(kernels::cpu_table(), count);
  return make_cpu_device(kernels::cpu_table(), count);
}

}  // namespace capstan::train

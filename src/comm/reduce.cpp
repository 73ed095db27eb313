#include "comm/reduce.hpp"

#include <algorithm>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "tensor/host_view.hpp"

namespace capstan::comm {

namespace {
// sum[i] = part 0 [i] + part 1 [i] + …, the parts lying one after the other.
void sum_parts(Device& device, const float* parts, int count, float* sum, int64_t n) {
  constexpr int64_t kTile = 1 << 16;
  const auto tile = [&](int64_t t, int) {
    const int64_t end = std::min(n, (t + 1) * kTile);
    for (int64_t i = t * kTile; i < end; ++i) {
      float total = parts[i];
      for (int part = 1; part < count; ++part) total += parts[part * n + i];
      sum[i] = total;
    }
  };
  if (device.context().pool)
    device.context().pool->parallel_for(ceil_div(n, kTile), tile);
  else
    for (int64_t t = 0; t < ceil_div(n, kTile); ++t) tile(t, 0);
}
}  // namespace

void all_reduce(Communicator& group, std::span<double> values, ReduceOp op) {
  if (group.alone() || values.empty()) return;
  const auto size = static_cast<size_t>(group.size());
  std::vector<double> all(values.size() * size);
  group.all_gather(values.data(), all.data(), static_cast<int64_t>(values.size_bytes()));
  for (size_t i = 0; i < values.size(); ++i) {
    double result = all[i];
    for (size_t r = 1; r < size; ++r) {
      const double other = all[r * values.size() + i];
      result = op == ReduceOp::sum   ? result + other
               : op == ReduceOp::max ? std::max(result, other)
                                     : std::min(result, other);
    }
    values[i] = result;
  }
}
double all_reduce(Communicator& group, double value, ReduceOp op) {
  all_reduce(group, std::span(&value, 1), op);
  return value;
}

void reduce_scatter_sum(Communicator& group, const Tensor& values) {
  if (group.alone()) return;
  const int size = group.size();
  CAPSTAN_ASSERT(values.dtype() == DType::f32 && values.is_contiguous() && values.elements() % size == 0,
                 "reduce_scatter of " + values.text());
  const int64_t n = values.elements() / size;
  OwnerScope scope(MemoryOwner::workspace);
  const Tensor received = Tensor::empty(values.device(), {values.elements()});
  if (values.device().is_meta()) return;
  HostView data(values), parts(received, HostView::Contents::undefined);
  group.all_to_all(data.data(), parts.data(), n * 4);
  sum_parts(values.device(), parts.as<float>(), size, data.as<float>() + group.rank() * n, n);
  data.store();
}

void all_gather_slices(Communicator& group, const Tensor& values) {
  if (group.alone() || values.device().is_meta()) return;
  CAPSTAN_ASSERT(values.is_contiguous() && values.elements() % group.size() == 0,
                 "all_gather of " + values.text());
  HostView data(values);
  const int64_t bytes = values.bytes() / group.size();
  group.all_gather(data.data() + group.rank() * bytes, data.data(), bytes);
  data.store();
}

void all_reduce_sum(Communicator& group, const Tensor& values) {
  reduce_scatter_sum(group, values);
  all_gather_slices(group, values);
}

void all_reduce_sum_any(Communicator& group, const Tensor& values) {
  if (group.alone() || values.elements() == 0) return;
  const int64_t padded = round_up(values.elements(), group.size());
  if (padded == values.elements()) return all_reduce_sum(group, values);
  OwnerScope scope(MemoryOwner::workspace);
  const Tensor copy = Tensor::zeros(values.device(), {padded});
  values.device().copy(copy.address(), values.address(), values.bytes());
  all_reduce_sum(group, copy);
  values.device().copy(values.address(), copy.address(), values.bytes());
}

}  // namespace capstan::comm

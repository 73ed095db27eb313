#include "optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "optim/host_updates.hpp"
#include "optim/muon.hpp"
#include "optim/state_file.hpp"
#include "tensor/launch.hpp"

namespace capstan::optim {

std::vector<FlatBuffer> with_range_tables(Device& device, std::vector<FlatBuffer> buffers) {
  CategoryScope scope(MemoryCategory::workspace);
  for (FlatBuffer& buffer : buffers) {
    int64_t block = 0;
    for (kernels::UpdateRange& range : buffer.ranges) {
      range.first_block = block;
      block += ceil_div(range.count, kernels::kMomentBlock);
    }
    const auto bytes = std::as_bytes(std::span(buffer.ranges));
    Device& home = buffer.host ? *buffer.host : device;
    buffer.table = Tensor::empty(home, {static_cast<int64_t>(bytes.size())}, DType::u8);
    buffer.table.copy_from_host_bytes(bytes);
  }
  return buffers;
}

namespace {

int64_t range_count(const FlatBuffer& buffer) {
  return static_cast<int64_t>(buffer.ranges.size());
}

int64_t moment_blocks(const FlatBuffer& buffer) {
  int64_t blocks = 0;
  for (const kernels::UpdateRange& range : buffer.ranges)
    blocks += ceil_div(range.count, kernels::kMomentBlock);
  return blocks;
}

// u8: fp8 with scales.
DType dtype_of(config::MomentType type, const char* field) {
  switch (type) {
    case config::MomentType::fp32:
      return DType::f32;
    case config::MomentType::bf16:
      return DType::bf16;
    case config::MomentType::fp8:
      return DType::u8;
    case config::MomentType::fp16:
      break;
  }
  fail(ErrorCode::unsupported, std::string(field) + ": this build has moments in fp32, bf16 and fp8",
       std::string(field) + "=bf16");
}

class Adam : public Optimizer {
 public:
  Adam(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers, uint64_t seed)
      : Optimizer(config, device, std::move(buffers)), seed_(seed) {
    add_state("exp_avg", BufferSelection::without_matrices,
              dtype_of(config.exp_avg_dtype, "optimizer.exp_avg_dtype"));
    add_state("exp_avg_sq", BufferSelection::without_matrices,
              dtype_of(config.exp_avg_sq_dtype, "optimizer.exp_avg_sq_dtype"), true);
  }

 protected:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const auto t = static_cast<double>(steps_);
    const auto key = [&](uint64_t array) {
      return philox_key(seed_, purpose::stochastic_rounding, 3 * static_cast<uint64_t>(steps_) + array);
    };
    const kernels::AdamStep step{
        .scale = scale,
        .beta1 = static_cast<float>(config_.adam_beta1),
        .beta2 = static_cast<float>(config_.adam_beta2),
        .eps = static_cast<float>(config_.adam_eps),
        .bias_correction1 = static_cast<float>(1.0 - std::pow(config_.adam_beta1, t)),
        .bias_correction2 = static_cast<float>(1.0 - std::pow(config_.adam_beta2, t)),
        .rounding = {config_.stochastic_rounding, key(0), key(1), key(2)}};
    const FlatBuffer& buffer = buffers_[b];
    Device& device = device_of(b);
    const kernels::Optimizers& kernel = *device.table().optimizers;
    const State &m = state_[0], &v = state_[1];
    launch(device, kernel.update_workspace(range_count(buffer)), kernel.adam, step, control, buffer.table,
           range_count(buffer), buffer.gradients, buffer.main, m.buffers[b], m.scales[b], v.buffers[b],
           v.scales[b], buffer.model);
  }

 private:
  uint64_t seed_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : Optimizer(config, device, std::move(buffers)) {
    add_state("momentum_buffer", BufferSelection::all);
  }

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const kernels::SgdStep step{.scale = scale, .momentum = static_cast<float>(config_.sgd_momentum)};
    const FlatBuffer& buffer = buffers_[b];
    Device& device = device_of(b);
    const kernels::Optimizers& kernel = *device.table().optimizers;
    launch(device, kernel.update_workspace(range_count(buffer)), kernel.sgd, step, control, buffer.table,
           range_count(buffer), buffer.gradients, buffer.main, state_[0].buffers[b], buffer.model);
  }
};

class Lion final : public Optimizer {
 public:
  Lion(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
      : Optimizer(config, device, std::move(buffers)) {
    add_state("exp_avg", BufferSelection::all);
  }

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const kernels::LionStep step{.scale = scale,
                                 .beta1 = static_cast<float>(config_.lion_beta1),
                                 .beta2 = static_cast<float>(config_.lion_beta2)};
    const FlatBuffer& buffer = buffers_[b];
    Device& device = device_of(b);
    const kernels::Optimizers& kernel = *device.table().optimizers;
    launch(device, kernel.update_workspace(range_count(buffer)), kernel.lion, step, control, buffer.table,
           range_count(buffer), buffer.gradients, buffer.main, state_[0].buffers[b], buffer.model);
  }
};

// Adam for the buffers without matrices. The ranks of MuonGroups::replica hold parts of a buffer's momentum:
// it is gathered during the orthogonalization of the buffer before it.
class Muon final : public Adam {
 public:
  Muon(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers, uint64_t seed)
      : Adam(config, device, std::move(buffers), seed) {
    add_state("momentum_buffer", BufferSelection::with_matrices);
  }

 private:
  void update(size_t b, const kernels::StepScale& scale, const Tensor& control) override {
    const FlatBuffer& buffer = buffers_[b];
    if (buffer.matrices.empty()) return Adam::update(b, scale, control);
    if (!gathers_.contains(b)) start_momentum(b, scale, control);
    if (const size_t next = next_matrices(b); next < buffers_.size() && buffers_[next].groups.replica)
      start_momentum(next, scale, control);
    gathers_.extract(b).mapped().wait();
    Orthogonalizer(config_, buffer.groups).run(buffer.matrices, buffer.slice);
    const kernels::Optimizers& kernel = *device_.table().optimizers;
    launch(device_, kernel.update_workspace(range_count(buffer)), kernel.muon_update, scale, control,
           buffer.table, range_count(buffer), buffer.gradients, buffer.main, buffer.model);
  }

  // Updates the momentum, and starts to gather it.
  void start_momentum(size_t b, const kernels::StepScale& scale, const Tensor& control) {
    const FlatBuffer& buffer = buffers_[b];
    const kernels::Optimizers& kernel = *device_.table().optimizers;
    const kernels::MuonStep step{.scale = scale,
                                 .momentum = static_cast<float>(config_.muon_momentum),
                                 .nesterov = config_.muon_use_nesterov};
    launch(device_, kernel.update_workspace(range_count(buffer)), kernel.muon_momentum, step, control,
           buffer.table, range_count(buffer), buffer.gradients, buffer.main, state_.back().buffers[b]);
    comm::Communicator* const replica = buffer.groups.replica;
    gathers_[b] = replica ? comm::start_gather_slices(*replica, buffer.slice,
                                                      "momentum of bucket " + std::to_string(buffer.bucket))
                          : comm::PendingTransfers();
  }
  // The index of the next buffer with matrices, or the number of buffers.
  size_t next_matrices(size_t b) const {
    const auto next = std::find_if(buffers_.begin() + static_cast<std::ptrdiff_t>(b) + 1, buffers_.end(),
                                   [](const FlatBuffer& other) { return !other.matrices.empty(); });
    return static_cast<size_t>(next - buffers_.begin());
  }

  // The pending gathers of the present buffer and the next one; empty between steps.
  std::map<size_t, comm::PendingTransfers> gathers_;
};

}  // namespace

Optimizer::Optimizer(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers)
    : device_(device),
      config_(config),
      host_updates_(HostUpdates::of(buffers)),
      buffers_(with_range_tables(device, std::move(buffers))) {}
Optimizer::~Optimizer() = default;

void Optimizer::add_state(const char* name, BufferSelection selection, DType type, bool square_root) {
  CategoryScope scope(MemoryCategory::moments);
  State& state = state_.emplace_back(
      State{.name = name, .square_root = square_root, .stored = type == DType::u8 ? DType::f32 : type});
  for (size_t b = 0; b < buffers_.size(); ++b) {
    const FlatBuffer& buffer = buffers_[b];
    Tensor& values = state.buffers.emplace_back();
    Tensor& scales = state.scales.emplace_back();
    if (selection != BufferSelection::all &&
        buffer.matrices.empty() != (selection == BufferSelection::without_matrices))
      continue;
    if (buffer.file) continue;
    values = Tensor::zeros(device_of(b), buffer.main.shape(), type);
    if (type == DType::u8) scales = Tensor::zeros(device_of(b), {moment_blocks(buffer)});
  }
  add_state_in_file(state, type);
}

void Optimizer::add_state_in_file(State& state, DType type) {
  StateFile* file = nullptr;
  std::vector<int64_t> counts, blocks;
  for (const FlatBuffer& buffer : buffers_) {
    if (!buffer.file) continue;
    CAPSTAN_ASSERT(buffer.matrices.empty() && buffer.chunk == counts.size(), "a buffer in a file");
    file = buffer.file;
    counts.push_back(buffer.main.elements());
    blocks.push_back(moment_blocks(buffer));
  }
  if (!file) return;
  const StateFile::Array values = file->add(type, counts);
  const StateFile::Array scales = type == DType::u8 ? file->add(DType::f32, blocks) : StateFile::Array();
  state.value_array = values.index, state.scale_array = scales.index;
  for (size_t b = 0; b < buffers_.size(); ++b) {
    if (!buffers_[b].file) continue;
    state.buffers[b] = values.chunks[buffers_[b].chunk];
    if (type == DType::u8) state.scales[b] = scales.chunks[buffers_[b].chunk];
  }
}

void Optimizer::load(const State& state, size_t b) const {
  const FlatBuffer& buffer = buffers_[b];
  if (!buffer.file) return;
  buffer.file->load(buffer.chunk, state.value_array);
  if (state.scales[b].defined()) buffer.file->load(buffer.chunk, state.scale_array);
}

Tensor Optimizer::values(const State& state, int buffer, int64_t begin, int64_t count) const {
  const auto b = static_cast<size_t>(buffer);
  load(state, b);
  if (!state.scales[b].defined()) return state.buffers[b].flat_range(begin, count, {count});
  CategoryScope scope(MemoryCategory::workspace);
  Device& device = device_of(b);
  Tensor values = Tensor::empty(device, {count});
  launch(device, device.table().optimizers->decode_moment, buffers_[b].table, range_count(buffers_[b]),
         state.square_root, state.buffers[b], state.scales[b], begin, count, values);
  return values;
}

void Optimizer::set_values(const State& state, int buffer, int64_t begin, const Tensor& values) {
  const auto b = static_cast<size_t>(buffer);
  const int64_t count = values.elements();
  load(state, b);
  Device& device = device_of(b);
  if (state.scales[b].defined())
    launch(device, device.table().optimizers->encode_moment, buffers_[b].table, range_count(buffers_[b]),
           state.square_root, values, begin, count, state.buffers[b], state.scales[b]);
  else if (!values.shares_storage_with(state.buffers[b]))
    launch(device, device.table().elementwise->cast, values,
           state.buffers[b].flat_range(begin, count, {count}), count);
  if (const FlatBuffer& home = buffers_[b]; home.file) {
    home.file->set_changed(home.chunk, state.value_array);
    if (state.scales[b].defined()) home.file->set_changed(home.chunk, state.scale_array);
  }
}

void Optimizer::step(const StepOptions& options, const Tensor& control) {
  ++steps_;
  const kernels::StepScale scale{.lr = options.lr,
                                 .decoupled_lr = options.decoupled_lr,
                                 .weight_decay = static_cast<float>(options.weight_decay),
                                 .decoupled_decay = config_.decoupled_weight_decay};
  // The CPU's updates begin first and overlap with those of the device.
  if (host_updates_) host_updates_->begin(control);
  for (size_t b = 0; b < buffers_.size(); ++b) {
    if (!buffers_[b].host) continue;
    host_updates_->run(buffers_[b], [&](const Tensor& host_control) { update(b, scale, host_control); });
  }
  for (size_t b = 0; b < buffers_.size(); ++b)
    if (!buffers_[b].host && (!buffers_[b].ranges.empty() || !buffers_[b].matrices.empty()))
      update(b, scale, control);
  if (host_updates_) host_updates_->finish();
}

std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers, uint64_t seed) {
  switch (config.optimizer) {
    case config::OptimizerKind::adam:
      return std::make_unique<Adam>(config, device, std::move(buffers), seed);
    case config::OptimizerKind::sgd:
      return std::make_unique<Sgd>(config, device, std::move(buffers));
    case config::OptimizerKind::lion:
      return std::make_unique<Lion>(config, device, std::move(buffers));
    case config::OptimizerKind::muon:
      break;
  }
  return std::make_unique<Muon>(config, device, std::move(buffers), seed);
}

void sum_of_squares(const std::vector<FlatBuffer>& buffers, const Tensor& sum, Tensor FlatBuffer::*which,
                    bool accumulate) {
  Device& device = sum.device();
  const kernels::Optimizers& kernel = *device.table().optimizers;
  if (buffers.empty() && !accumulate) device.zero(sum.address(), sum.bytes());
  for (const FlatBuffer& buffer : buffers) {
    if (buffer.file) buffer.file->load(buffer.chunk, FlatBuffer::kMainArray);
    launch(device, kernel.sum_of_squares_workspace(range_count(buffer), (buffer.*which).elements()),
           kernel.sum_of_squares, buffer.table, range_count(buffer), buffer.*which, sum,
           accumulate || &buffer != buffers.data());
  }
}

void count_zeros(const std::vector<FlatBuffer>& buffers, const Tensor& count) {
  Device& device = count.device();
  const kernels::Optimizers& kernel = *device.table().optimizers;
  if (buffers.empty()) device.zero(count.address(), count.bytes());
  for (const FlatBuffer& buffer : buffers)
    launch(device, kernel.count_zeros_workspace(range_count(buffer), buffer.gradients.elements()),
           kernel.count_zeros, buffer.table, range_count(buffer), buffer.gradients, count,
           &buffer != buffers.data());
}

}  // namespace capstan::optim

// Optimizers over flat buffers. Ranges of a buffer differ in weight decay and learning rate. The optimizer
// allocates its state (moments) in the buffer's shape; checkpoints store it with the main parameters.
//
// Bytes an element of the moments: 4 in fp32, 2 in bf16, 1.06 in fp8 (kernels/common/fp8_moment.hpp).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "config/sections/optimizer.hpp"
#include "kernels/optimizers.hpp"
#include "ops/shard.hpp"
#include "tensor/host_device.hpp"
#include "tensor/tensor.hpp"

namespace capstan::optim {

class StateFile;

// A weight matrix that is updated as one, by Muon. Ranks of MuonGroups::tensor hold shards of it, and ranks
// of MuonGroups::shard slices of such a shard.
struct Matrix {
  // Offset of the local shard in the bucket of which a buffer is a part, elements.
  int64_t begin = 0;
  Shape global;  // [rows, columns]
  // Over ShardingAxis::tensor, whichever ranks MuonGroups::tensor are.
  Sharding sharding;
  // Rows of the matrices that are packed in it, in groups of one of each (queries, keys and values); empty:
  // it is one matrix.
  std::vector<int64_t> split;
};

// Process groups over which Muon gathers the matrices of a buffer; null: a group of one.
struct MuonGroups {
  // Ranks over which the buffer is divided.
  comm::Communicator* shard = nullptr;
  // Ranks over which each part is divided again. The momentum of one bucket is gathered over them beside the
  // orthogonalization of the bucket before it.
  comm::Communicator* replica = nullptr;
  // Tensor-parallel ranks, of experts the expert tensor-parallel ranks.
  comm::Communicator* tensor = nullptr;
};

// The parameters that this rank updates, in contiguous memory.
struct FlatBuffer {
  // fp32, or bf16 where the model computes with it and there are no main parameters apart; [n].
  Tensor main;
  // fp32, or for Adam bf16; [n].
  Tensor gradients;
  // Compute type [n]; undefined where the model computes with main.
  Tensor model;
  // Sorted, disjoint; elements outside are padding and are not updated. with_range_tables() sets first_block.
  std::vector<kernels::UpdateRange> ranges;
  // Bytes of the range table on the device; set by with_range_tables().
  Tensor table = {};
  // The matrices of the bucket, on all ranks; empty: the buffer is updated element by element.
  std::vector<Matrix> matrices = {};
  // With matrices: the gradients of this rank of MuonGroups::shard, fp32. If the ranks of MuonGroups::replica
  // divide them, `gradients` is a slice of this tensor; else both are the same tensor. These tensors of all
  // ranks of MuonGroups::shard, in rank order, are the bucket's gradients.
  Tensor slice = {};
  MuonGroups groups = {};
  // Index of the bucket, for traces.
  size_t bucket = 0;
  // The grid of ranks over which statistics of the buffer are summed.
  ParameterGrid grid = ParameterGrid::dense;
  // Offloaded state: the tensors above and the moments lie in host memory, where the CPU updates them
  // (host_updates.hpp, which sets `gradients`). Null: they lie on the device that computes the gradients.
  HostDevice* host = nullptr;
  // With `host`: the file that holds the state of the buffer, as this chunk. The tensors in host memory have
  // the buffer's values after StateFile::load(). `main` is the array kMainArray. Null: the state lies in host
  // memory only.
  StateFile* file = nullptr;
  size_t chunk = 0;
  static constexpr size_t kMainArray = 0;
  // With `host`, on the device: the reduced gradients, in the type of `gradients` [n], and the parameters in
  // the compute type [n].
  Tensor device_gradients = {}, device_parameters = {};
};
// Uploads the tables of `ranges`, to the device of the buffer: `device`, or FlatBuffer::host.
std::vector<FlatBuffer> with_range_tables(Device& device, std::vector<FlatBuffer> buffers);

struct StepOptions {
  double lr = 0, decoupled_lr = 0, weight_decay = 0;
};

class HostUpdates;

class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  // One update: one launch for each buffer that is updated element by element. It may overwrite the
  // gradients. With matrices collective over the groups. control: one kernels::StepControl in bytes, in
  // device memory. The update counts in steps() even if `control` skips it, which the caller takes back with
  // set_steps(). The compute queue waits for the updates of offloaded buffers, the host does not.
  void step(const StepOptions& options, const Tensor& control);
  // State by name ("exp_avg", "exp_avg_sq"), one tensor [n] for each buffer; undefined: the buffer has none.
  struct State {
    std::string name;
    std::vector<Tensor> buffers;
    // fp8: one for each kernels::kMomentBlock elements of a range.
    std::vector<Tensor> scales;
    // Indices in FlatBuffer::file of the values and the scales.
    size_t value_array = 0, scale_array = 0;
    // fp8: the codes are those of its square root.
    bool square_root = false;
    // Type of values(), and in checkpoints.
    DType stored = DType::f32;
    bool has(int buffer) const { return buffers[static_cast<size_t>(buffer)].defined(); }
  };
  const std::vector<State>& state() const { return state_; }
  // Elements [begin, begin + count) of a buffer's state: a view, or of fp8 moments a copy in fp32. A view of
  // state in a file is valid until that of another buffer is asked for.
  Tensor values(const State& state, int buffer, int64_t begin, int64_t count) const;
  // Sets the elements of complete ranges from `begin` on; `values` may be what values() returned.
  void set_values(const State& state, int buffer, int64_t begin, const Tensor& values);
  // The buffers with their range tables.
  const std::vector<FlatBuffer>& buffers() const { return buffers_; }
  // Updates made: Adam's t.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 protected:
  Optimizer(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers);
  // Allocates zeros for the buffers with matrices, or for those without.
  enum class BufferSelection : uint8_t { all, with_matrices, without_matrices };
  void add_state(const char* name, BufferSelection selection, DType type = DType::f32,
                 bool square_root = false);
  // The state of the buffers that lie in a file.
  void add_state_in_file(State& state, DType type);
  // Loads the values of a buffer that lie in a file.
  void load(const State& state, size_t b) const;
  // The device that updates buffers_[b].
  Device& device_of(size_t b) const { return buffers_[b].host ? *buffers_[b].host : device_; }
  // Updates buffers_[b]; `control` is on its device.
  virtual void update(size_t b, const kernels::StepScale& scale, const Tensor& control) = 0;

  Device& device_;
  const config::OptimizerConfig config_;
  // Null: no buffer is offloaded.
  const std::unique_ptr<HostUpdates> host_updates_;
  std::vector<FlatBuffer> buffers_;
  std::vector<State> state_;
  int64_t steps_ = 0;
};

// `seed`: of stochastic rounding. ErrorCode::unsupported for formats that this build lacks.
std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers, uint64_t seed = 0);

// Statistics over the counted ranges of buffers with range tables, into device memory; the caller sums over
// ranks.
// Sums the squares of the gradients, or of FlatBuffer::main, in double. The sum is not finite if a value is
// not. sum: fp64 [1], on the device of the buffers. accumulate: adds to its value.
void sum_of_squares(const std::vector<FlatBuffer>& buffers, const Tensor& sum,
                    Tensor FlatBuffer::*which = &FlatBuffer::gradients, bool accumulate = false);
// The number of gradients that are zero. count: i64 [1].
void count_zeros(const std::vector<FlatBuffer>& buffers, const Tensor& count);

}  // namespace capstan::optim

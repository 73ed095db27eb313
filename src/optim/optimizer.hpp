// Optimizers over flat fp32 buffers. Ranges of a buffer differ in weight decay and learning rate. The
// optimizer allocates its state (moments) in the buffer's shape; checkpoints store it with the main
// parameters.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "config/sections/optimizer.hpp"
#include "kernels/optimizers.hpp"
#include "tensor/tensor.hpp"

namespace capstan::optim {

// The parameters that this rank updates, in contiguous memory.
struct FlatBuffer {
  struct Range {
    int64_t begin = 0, count = 0;  // elements
    bool weight_decay = true;
    bool decoupled_lr = false;  // embedding and head
    // LoRA+: for an adapter's B.
    double lr_factor = 1;
    // In the gradient norm, by one of the ranks with these elements.
    bool counted = true;
  };
  Tensor main;       // fp32 [n]
  Tensor gradients;  // fp32 [n]
  // Compute type [n]; undefined where the model computes with main.
  Tensor model;
  // Sorted, disjoint; elements outside are padding and are not updated.
  std::vector<Range> ranges;
  // The ranges as kernels read them, kernels::UpdateRange [ranges.size()] in bytes; with_range_tables().
  Tensor table = {};
};
// Uploads the tables of `ranges`.
std::vector<FlatBuffer> with_range_tables(Device& device, std::vector<FlatBuffer> buffers);

struct StepOptions {
  double lr = 0, decoupled_lr = 0, weight_decay = 0;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  // One update: one launch for each buffer. control: one kernels::StepControl in bytes, in device memory. It
  // counts in steps() even if `control` skips it, which the caller takes back with set_steps().
  void step(const StepOptions& options, const Tensor& control);
  // State tensors by name ("exp_avg", "exp_avg_sq"), one for each buffer, fp32 [n].
  struct State {
    std::string name;
    std::vector<Tensor> buffers;
  };
  const std::vector<State>& state() const { return state_; }
  // With their range tables.
  const std::vector<FlatBuffer>& buffers() const { return buffers_; }
  int64_t steps() const { return steps_; }  // updates made: Adam's t
  void set_steps(int64_t steps) { steps_ = steps; }

 protected:
  // Allocates a zero state tensor for each name and buffer.
  Optimizer(const config::OptimizerConfig& config, Device& device, std::vector<FlatBuffer> buffers,
            std::initializer_list<const char*> state_names);
  // Launches the update of buffers_[b].
  virtual void update(size_t b, const kernels::StepScale& scale, const Tensor& control) = 0;

  Device& device_;
  const config::OptimizerConfig config_;
  std::vector<FlatBuffer> buffers_;
  std::vector<State> state_;
  int64_t steps_ = 0;
};

// ErrorCode::unsupported for algorithms without a kernel.
std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers);

// Statistics over the counted ranges of buffers with range tables, into device memory; the caller sums over
// ranks.
// Of the gradients, or of FlatBuffer::main, in double; not finite if a value is not. sum: fp64 [1].
void sum_of_squares(const std::vector<FlatBuffer>& buffers, const Tensor& sum,
                    Tensor FlatBuffer::*which = &FlatBuffer::gradients);
// The number of gradients that are zero. count: i64 [1].
void count_zeros(const std::vector<FlatBuffer>& buffers, const Tensor& count);

}  // namespace capstan::optim

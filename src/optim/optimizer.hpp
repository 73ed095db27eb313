// Optimizers over flat fp32 buffers. Ranges of a buffer differ in weight decay and learning rate. The
// optimizer allocates its state (moments) in the buffer's shape; checkpoints store it with the main
// parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/sections/optimizer.hpp"
#include "tensor/tensor.hpp"

namespace capstan::optim {

// The parameters that this rank updates, in contiguous memory.
struct FlatBuffer {
  struct Range {
    int64_t begin = 0, count = 0;  // elements
    bool weight_decay = true;
    bool decoupled_lr = false;  // embedding and head
    double lr_factor = 1;       // LoRA+: for an adapter's B
    // In the gradient norm, by one of the ranks with these elements.
    bool counted = true;
  };
  Tensor main;       // fp32 [n]
  Tensor gradients;  // fp32 [n]
  // Compute type [n]; undefined where the model computes with main.
  Tensor model;
  // Sorted, disjoint; elements outside are padding and are not updated.
  std::vector<Range> ranges;
};

struct StepOptions {
  double lr = 0, decoupled_lr = 0, weight_decay = 0;
  float gradient_scale = 1;  // clipping times 1 / token count
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual void step(const StepOptions& options) = 0;
  // State tensors by name ("exp_avg", "exp_avg_sq"), one for each buffer, fp32 [n].
  struct State {
    std::string name;
    std::vector<Tensor> buffers;
  };
  virtual const std::vector<State>& state() const = 0;
  int64_t steps() const { return steps_; }  // updates made: Adam's t
  void set_steps(int64_t steps) { steps_ = steps; }

 protected:
  int64_t steps_ = 0;
};

// ErrorCode::unsupported for algorithms without a kernel.
std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers);

// Sums of squares over the buffers' counted ranges, in double; the caller sums over ranks.
class GradientNorm {
 public:
  explicit GradientNorm(Device& device);
  // Of the gradients, or of FlatBuffer::main. Waits for the device; not finite if a value is not.
  double sum_of_squares(const std::vector<FlatBuffer>& buffers,
                        Tensor FlatBuffer::*which = &FlatBuffer::gradients);

 private:
  Tensor result_;  // fp64 [1]
};

// The number of zero gradients in the counted ranges, counted on the host: for logging.
int64_t count_zeros(const std::vector<FlatBuffer>& buffers);

// The factor that clips gradients of this norm to `clip` (0: no clipping).
double clip_factor(double norm, double clip);

}  // namespace capstan::optim

// Optimizers over flat fp32 buffers. A buffer's elements are updated range by range; ranges differ in weight decay and
// learning rate. State (moments) is made here, in the buffer's shape, and is what a checkpoint stores beside the main
// parameters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/sections/optimizer.hpp"
#include "tensor/tensor.hpp"

namespace capstan::optim {

// The parameters that this rank updates, as one flat piece of memory.
struct FlatBuffer {
  struct Range {
    int64_t begin = 0, count = 0;  // elements
    bool weight_decay = true;
    bool decoupled_lr = false;  // embedding and head
    double lr_factor = 1;       // LoRA+: of an adapter's second factor
    bool counted = true;  // in the gradient norm here: of ranks with the same elements only one counts them
  };
  Tensor main;                // fp32 [n]
  Tensor gradients;           // fp32 [n]
  Tensor model;               // compute type [n]; undefined where main is what the model computes with
  std::vector<Range> ranges;  // sorted, disjoint; what no range covers is padding and stays as it is
};

struct StepOptions {
  double lr = 0, decoupled_lr = 0, weight_decay = 0;
  float gradient_scale = 1;  // clipping and the division by the token count, in one factor
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

// ErrorCode::unsupported for kinds that have no kernel yet, by name.
std::unique_ptr<Optimizer> build(const config::OptimizerConfig& config, Device& device,
                                 std::vector<FlatBuffer> buffers);

// Sums of squares over the buffers' counted ranges, in double; the caller adds up over ranks.
class GradientNorm {
 public:
  explicit GradientNorm(Device& device);
  // Of the gradients, or of FlatBuffer::main. Waits for the device; not finite if a value is not.
  double sum_of_squares(const std::vector<FlatBuffer>& buffers,
                        Tensor FlatBuffer::*which = &FlatBuffer::gradients);

 private:
  Tensor result_;  // fp64 [1]
};

// Elements of the gradients in the counted ranges that are zero. They are counted on the host: for logging.
int64_t count_zeros(const std::vector<FlatBuffer>& buffers);

// The factor that scales gradients of this norm to at most clip (0: no clipping).
double clip_factor(double norm, double clip);

}  // namespace capstan::optim

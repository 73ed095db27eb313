// Kernels of the optimizers and of the gradient norm. One launch works on a whole flat buffer; a table of
// ranges, in device memory, says which elements belong to a parameter and how they are treated. Elements
// outside of all ranges are padding: no kernel reads or writes them.
#pragma once

#include <cstdint>

#include "kernels/step_control.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Elements that an update treats alike. A table is sorted by `begin` and its ranges are disjoint; kernels
// take it as `ranges`, an array of `range_count` of them.
struct UpdateRange {
  int64_t begin = 0, count = 0;  // elements
  double lr_factor = 1;
  // Whether StepScale::decoupled_lr is used instead of StepScale::lr.
  int32_t decoupled_lr = 0;
  // Whether the elements decay.
  int32_t weight_decay = 1;
  // Whether they count in norms and numbers of zeros. 0: another rank counts its copy of these elements.
  int32_t counted = 1;
  int32_t padding = 0;
};
// What all update rules share.
struct StepScale {
  double lr = 0, decoupled_lr = 0;
  float weight_decay = 0;
  // Weight decay applies to the weights; else it is added to the gradient (L2 regularization).
  bool decoupled_decay = true;
};
struct AdamStep {
  StepScale scale;
  float beta1 = 0, beta2 = 0, eps = 0;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^t
};
struct SgdStep {
  StepScale scale;
  float momentum = 0;
  bool nesterov = false;
};
struct LionStep {
  StepScale scale;
  float beta1 = 0, beta2 = 0;
};

// control: one StepControl; its `skip` leaves all arrays as they are. w: main parameters, fp32. g: gradient *
// control.gradient, fp32. `model` receives w rounded to its type where
// it is a separate copy, else it is null. All arrays are indexed alike.
struct Optimizers {
  // Adam (Kingma and Ba, 2015), AdamW (Loshchilov and Hutter, 2019): 28 bytes read and written an element.
  void (*adam)(Context&, AdamStep, In control, In ranges, int64_t range_count, const float* gradient,
               float* main, float* exp_avg, float* exp_avg_sq, Out model);
  // buffer = momentum * buffer + g; w -= lr * (nesterov ? g + momentum * buffer : buffer). Without momentum
  // the buffer is neither read nor written.
  void (*sgd)(Context&, SgdStep, In control, In ranges, int64_t range_count, const float* gradient,
              float* main, float* buffer, Out model);
  // Lion (Chen et al., 2023): w -= lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g.
  // sign(0) = 0. 20 bytes an element in fp32.
  void (*lion)(Context&, LionStep, In control, In ranges, int64_t range_count, const float* gradient,
               float* main, float* exp_avg, Out model);

  // Over the counted ranges, into one value at a device address; `accumulate` adds to it. The sum is entirely
  // in double: dividing it into ranges and ranks then changes only its last bits, far below the precision of
  // the fp32 clipping factor.
  void (*sum_of_squares)(Context&, In ranges, int64_t range_count, const float* x, double* out,
                         bool accumulate);
  void (*count_zeros)(Context&, In ranges, int64_t range_count, const float* x, int64_t* out,
                      bool accumulate);
};

}  // namespace capstan::kernels

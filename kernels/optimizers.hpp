// Kernels of the optimizers and of the gradient norm. One launch works on a full flat buffer; a table of
// ranges, in device memory, says which elements belong to a parameter and how they are treated. Elements
// outside of all ranges are padding: no kernel reads or writes them.
#pragma once

#include <cstdint>

#include "base/philox.hpp"
#include "kernels/step_control.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Elements that share the scale of an fp8 moment; the first block of a range begins at its first element.
inline constexpr int64_t kMomentBlock = 64;

// Elements that an update treats alike. A table is sorted by `begin` and its ranges are disjoint; kernels
// take it as `ranges`, an array of `range_count` of them.
struct UpdateRange {
  int64_t begin = 0, count = 0;  // elements
  // LoRA+: other than 1 for an adapter's B.
  double lr_factor = 1;
  // Embedding and head: whether StepScale::decoupled_lr is used instead of StepScale::lr.
  int32_t decoupled_lr = 0;
  // Whether weight decay applies to the elements.
  int32_t weight_decay = 1;
  // Whether the elements count in norms and numbers of zeros. 0: another rank counts its copy of them.
  int32_t counted = 1;
  int32_t padding = 0;
  // Index of the first block in the scales of fp8 moments.
  int64_t first_block = 0;
  // Positions of random numbers: a hash of the parameter's name, and the index in the global parameter. If
  // columns is 0, element i of the range has index origin + i. Otherwise, with j = column + i, its index is
  // origin + j / columns * row_stride + j % columns.
  uint64_t parameter = 0;
  int64_t origin = 0, column = 0, columns = 0, row_stride = 0;
};
// Stochastic rounding of the values that an update stores below fp32: up with the probability that makes the
// mean exact. Philox at (UpdateRange::parameter, global index); one key for each array.
struct StochasticRounding {
  bool enabled = false;
  PhiloxKey main{}, exp_avg{}, exp_avg_sq{};
};
// Values that all update rules read.
struct StepScale {
  double lr = 0, decoupled_lr = 0;
  float weight_decay = 0;
  // Weight decay applies to the weights; else it is added to the gradient (L2 regularization).
  bool decoupled_decay = true;
};
struct AdamStep {
  StepScale scale;
  float beta1 = 0, beta2 = 0, eps = 0;
  // 1 - beta^t.
  float bias_correction1 = 1, bias_correction2 = 1;
  StochasticRounding rounding{};
};
struct SgdStep {
  StepScale scale;
  float momentum = 0;
};
struct LionStep {
  StepScale scale;
  float beta1 = 0, beta2 = 0;
};
struct MuonStep {
  StepScale scale;
  float momentum = 0;
  bool nesterov = false;
};

// control: one StepControl; its `skip` leaves all arrays as they are. main: main parameters, fp32. gradient:
// fp32 where the comment says nothing else. g: gradient * control.gradient, in fp32. `model` receives the
// main parameters rounded to its type where it is a separate copy, else it is null. All arrays are indexed
// alike.
struct Optimizers {
  // Adam (Kingma and Ba, 2015), AdamW (Loshchilov and Hutter, 2019): 28 bytes read and written an element in
  // fp32. gradient and main: fp32 or bf16. The moments are fp32, bf16 or fp8 (common/fp8_moment.hpp), which
  // is u8 and has scales (else null): computed in fp32, then rounded.
  void (*adam)(Context&, AdamStep, In control, In ranges, int64_t range_count, In gradient, Out main,
               Out exp_avg, float* exp_avg_scales, Out exp_avg_sq, float* exp_avg_sq_scales, Out model);
  // buffer = momentum * buffer + g; w -= lr * buffer. Without momentum the buffer is neither read nor
  // written.
  void (*sgd)(Context&, SgdStep, In control, In ranges, int64_t range_count, const float* gradient,
              float* main, float* buffer, Out model);
  // Lion (Chen et al., 2023): w -= lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g.
  // sign(0) = 0. 20 bytes an element in fp32.
  void (*lion)(Context&, LionStep, In control, In ranges, int64_t range_count, const float* gradient,
               float* main, float* exp_avg, Out model);

  // Muon (Jordan et al., 2024), before the orthogonalization: buffer += (1 - momentum) (g - buffer); the
  // gradient becomes the update, nesterov ? g + momentum (buffer - g) : buffer.
  void (*muon_momentum)(Context&, MuonStep, In control, In ranges, int64_t range_count, float* gradient,
                        const float* main, float* buffer);
  // Muon, after the orthogonalization: w -= lr * update, with decoupled weight decay.
  void (*muon_update)(Context&, StepScale, In control, In ranges, int64_t range_count, const float* update,
                      float* main, Out model);
  // x /= max(sqrt(squares), eps). squares: the sum of the squares of the elements, one value.
  void (*normalize)(Context&, const double* squares, float eps, float* x, int64_t n);

  // fp8 moments to fp32 and back, elements [begin, begin + count) of the buffer; encode() rounds to nearest
  // and takes complete ranges. `root`: the moment is the second, of which the square root is stored.
  void (*decode_moment)(Context&, In ranges, int64_t range_count, bool root, const uint8_t* moment,
                        const float* scales, int64_t begin, int64_t count, float* values);
  void (*encode_moment)(Context&, In ranges, int64_t range_count, bool root, const float* values,
                        int64_t begin, int64_t count, uint8_t* moment, float* scales);

  // Sum over the counted ranges, into one value at a device address; `accumulate` adds to the value. The sum
  // is entirely in double: dividing it into ranges and ranks then changes only its last bits, far below the
  // precision of the fp32 clipping factor. x: fp32, bf16 or fp16.
  void (*sum_of_squares)(Context&, In ranges, int64_t range_count, In x, double* out, bool accumulate);
  // Number of zeros in the counted ranges, with the same arguments.
  void (*count_zeros)(Context&, In ranges, int64_t range_count, In x, int64_t* out, bool accumulate);

  // Workspace of adam, sgd, lion, muon_momentum and muon_update.
  WorkspaceSize (*update_workspace)(int64_t range_count);
  // elements: at least those of all counted ranges.
  WorkspaceSize (*sum_of_squares_workspace)(int64_t range_count, int64_t elements);
  WorkspaceSize (*count_zeros_workspace)(int64_t range_count, int64_t elements);
};

}  // namespace capstan::kernels

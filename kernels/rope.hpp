// Rotary position embedding (RoPE) of query and key heads, after a norm of each head where the model has one
// (QK norm), in one launch for both.
#pragma once

#include "kernels/heads.hpp"

namespace capstan::kernels {

enum class QkNorm : uint8_t { none, rms, layer };

struct RopeShape {
  int64_t rows = 0;  // tokens
  int64_t groups = 0, heads_per_group = 0, head_dim = 0;
  // Elements at the beginning of each head that rotate, even; 0: none.
  int64_t rotary_dim = 0;
  // Pairs are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2), the half-split form.
  bool interleaved = false;
  QkNorm norm = QkNorm::none;
  // Same meaning as in Norm.
  float gamma_offset = 0, eps = 0;
};

// cos, sin: fp32 [max_positions, rotary_dim / 2]; positions [rows], which row of them a token uses.
struct RopeAngles {
  const float *cos = nullptr, *sin = nullptr;
  const int32_t* positions = nullptr;
};
// [head_dim] each; null without a norm, beta also with RMSNorm.
struct QkNormWeights {
  In q_gamma, q_beta, k_gamma, k_beta;
};
// fp32 [head_dim] each. Null: the gradient is not computed.
struct QkNormGradients {
  float *q_gamma = nullptr, *q_beta = nullptr, *k_gamma = nullptr, *k_beta = nullptr;
  bool any() const { return q_gamma || q_beta || k_gamma || k_beta; }
};

// Values are not touched: attention reads them where they are. In `forward` an output may be its input; in
// `backward` dq_in, dk_in may be dq, dk, but not q, k. Bytes in fp32, E = heads * head_dim + groups *
// head_dim: forward 8 rows E; backward 8 rows E, with a norm 12 rows E.
struct Rope {
  // q_out, k_out = rotation(norm(q)), rotation(norm(k)); norm(x) = (x - mean) rstd (gamma + gamma_offset) +
  // beta over head_dim.
  void (*forward)(Context&, RopeShape, HeadsIn q, HeadsIn k, RopeAngles, QkNormWeights, HeadsOut q_out,
                  HeadsOut k_out);
  // dq, dk: gradients of q_out and k_out. q, k: the inputs of `forward`, read only with a norm, whose
  // statistics are computed again. Adds to the gradients of the weights.
  void (*backward)(Context&, RopeShape, HeadsIn dq, HeadsIn dk, HeadsIn q, HeadsIn k, RopeAngles,
                   QkNormWeights, HeadsOut dq_in, HeadsOut dk_in, QkNormGradients);

  // weight_gradients: any is wanted.
  WorkspaceSize (*backward_workspace)(RopeShape, bool weight_gradients);
};

}  // namespace capstan::kernels

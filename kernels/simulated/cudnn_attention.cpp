#include "kernels/simulated/cudnn_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "base/division.hpp"
#include "kernels/simulated/cublaslt.hpp"
#include "kernels/simulated/enqueue.hpp"

namespace capstan::kernels::simulated {

namespace {

struct CudnnState {
  CudnnUse use = CudnnUse::never;
  size_t extra_workspace = 0;
  bool refuses = false;
  int64_t most_matrix = kMostMatrixBytes;
  CudnnCounts counts;
};
std::mutex cudnn_mutex;
CudnnState cudnn_state;

// ---- what the library plans, and what is undefined

// Whether a head of that size has a plan on the simulated GPU (cudnn-frontend 1.32, cuDNN 9.19).
bool has_plan(const CudnnCall& c) {
  const int major = compute_capability() / 10;
  if (major < 8 || c.qk_dim % 8 != 0 || c.v_dim % 8 != 0 || c.heads % c.key_heads != 0) return false;
  if (c.window > 0 && !c.causal) return false;
  const int64_t widest = std::max(c.qk_dim, c.v_dim);
  if (!c.backward || major == 9) return widest <= 256 && !(c.backward && c.seq == 1);
  return c.seq > 1 && (widest <= 128 || (major == 10 && c.qk_dim == 192 && c.v_dim == 128));
}
// Bytes of workspace, as the library's plans for 8.0, 9.0 and 10.0 report them.
size_t plan_workspace(const CudnnCall& c) {
  const int major = compute_capability() / 10;
  if (!c.backward) return major == 9 ? 256 : 0;
  const int64_t heads = c.sequences * c.heads, widths = c.qk_dim + c.v_dim,
                of_keys = c.heads > c.key_heads ? heads * c.seq * widths * (major == 10 ? 4 : 2) : 0,
                matrix = 2 * heads * round_up(c.seq, 64) * round_up(c.seq, major == 9 ? 128 : 64);
  return static_cast<size_t>(4 * heads * c.seq + of_keys + (major == 10 ? 0 : matrix)) +
         (major == 9 ? 256 : 128);
}

struct CudnnTensor {
  const void* data;
  CudnnStrides strides;
};
std::vector<CudnnTensor> tensors_of(const CudnnCall& c, const CudnnPointers& p) {
  std::vector<CudnnTensor> tensors{{p.q, c.q}, {p.k, c.k}, {p.v, c.v}, {p.out, c.out}};
  if (c.backward) tensors.insert(tensors.end(), {{p.dout, c.dout}, {p.dq, c.dq}, {p.dk, c.dk}, {p.dv, c.dv}});
  return tensors;
}
// Null: the call is defined.
const char* defect_of(const CudnnCall& c, const CudnnPointers& p) {
  if (c.type != DType::bf16 && c.type != DType::f16)
    return "cuDNN: attention of a type other than bf16 and fp16";
  if (!p.lse || reinterpret_cast<uintptr_t>(p.lse) % 4 != 0)
    return "cuDNN: no lse, or one that is not aligned";
  for (const CudnnTensor& x : tensors_of(c, p)) {
    if (!x.data || reinterpret_cast<uintptr_t>(x.data) % 16 != 0)
      return "cuDNN: a tensor is missing, or not aligned to 16 bytes";
    for (const int64_t stride : {x.strides.sequence, x.strides.head, x.strides.token})
      if (stride % 8 != 0) return "cuDNN: a stride is not a multiple of 16 bytes";
  }
  if (plan_workspace(c) > 0 && reinterpret_cast<uintptr_t>(p.workspace) % 256 != 0)
    return "cuDNN: the workspace is not aligned to 256 bytes";
  return nullptr;
}

// ---- attention by its formula

// One head of a tensor, as fp32.
struct HeadRows {
  DType type;
  const void* data;
  int64_t first, token;
  float get(int64_t t, int64_t i) const {
    const int64_t at = first + t * token + i;
    return type == DType::bf16 ? static_cast<float>(static_cast<const bf16*>(data)[at])
                               : static_cast<float>(static_cast<const f16*>(data)[at]);
  }
  void put(int64_t t, int64_t i, float value) const {
    const int64_t at = first + t * token + i;
    if (type == DType::bf16)
      static_cast<bf16*>(const_cast<void*>(data))[at] = bf16(value);
    else
      static_cast<f16*>(const_cast<void*>(data))[at] = f16(value);
  }
};
HeadRows head_rows(const CudnnCall& c, const void* data, const CudnnStrides& s, int64_t sequence,
                   int64_t head) {
  return {c.type, data, sequence * s.sequence + head * s.head, s.token};
}
float dot(const HeadRows& x, int64_t i, const HeadRows& y, int64_t j, int64_t width) {
  float sum = 0;
  for (int64_t k = 0; k < width; ++k) sum += x.get(i, k) * y.get(j, k);
  return sum;
}
// The keys [first, end) of query i.
int64_t first_key(const CudnnCall& c, int64_t i) {
  return c.window > 0 ? std::max<int64_t>(0, i - c.window + 1) : 0;
}
int64_t end_key(const CudnnCall& c, int64_t i) {
  return c.causal ? i + 1 : c.seq;
}

void attend(const CudnnCall& c, const CudnnPointers& p, int64_t sequence, int64_t head) {
  const int64_t key_head = head / (c.heads / c.key_heads);
  const HeadRows q = head_rows(c, p.q, c.q, sequence, head), k = head_rows(c, p.k, c.k, sequence, key_head),
                 v = head_rows(c, p.v, c.v, sequence, key_head),
                 out = head_rows(c, p.out, c.out, sequence, head);
  auto* const lse = static_cast<float*>(p.lse) + (sequence * c.heads + head) * c.seq;
  std::vector<float> weights(static_cast<size_t>(c.seq));
  for (int64_t i = 0; i < c.seq; ++i) {
    float highest = -INFINITY, sum = 0;
    for (int64_t j = first_key(c, i); j < end_key(c, i); ++j) {
      float& logit = weights[static_cast<size_t>(j)];
      logit = c.scale * dot(q, i, k, j, c.qk_dim);
      highest = std::max(highest, logit);
    }
    for (int64_t j = first_key(c, i); j < end_key(c, i); ++j) {
      float& weight = weights[static_cast<size_t>(j)];
      weight = std::exp(weight - highest);
      sum += weight;
    }
    lse[i] = highest + std::log(sum);
    for (int64_t d = 0; d < c.v_dim; ++d) {
      float value = 0;
      for (int64_t j = first_key(c, i); j < end_key(c, i); ++j)
        value += weights[static_cast<size_t>(j)] * v.get(j, d);
      out.put(i, d, value / sum);
    }
  }
}

// The gradients of one head of keys and values, and of the query heads that share it.
void differentiate(const CudnnCall& c, const CudnnPointers& p, int64_t sequence, int64_t key_head) {
  const int64_t shared_by = c.heads / c.key_heads;
  const HeadRows k = head_rows(c, p.k, c.k, sequence, key_head),
                 v = head_rows(c, p.v, c.v, sequence, key_head);
  std::vector<float> dk(static_cast<size_t>(c.seq * c.qk_dim)), dv(static_cast<size_t>(c.seq * c.v_dim)),
      dq(static_cast<size_t>(c.qk_dim));
  for (int64_t head = key_head * shared_by; head < (key_head + 1) * shared_by; ++head) {
    const HeadRows q = head_rows(c, p.q, c.q, sequence, head),
                   out = head_rows(c, p.out, c.out, sequence, head),
                   dout = head_rows(c, p.dout, c.dout, sequence, head);
    const float* const lse = static_cast<const float*>(p.lse) + (sequence * c.heads + head) * c.seq;
    for (int64_t i = 0; i < c.seq; ++i) {
      const float of_query = dot(dout, i, out, i, c.v_dim);
      std::fill(dq.begin(), dq.end(), 0.0f);
      for (int64_t j = first_key(c, i); j < end_key(c, i); ++j) {
        const float weight = std::exp(c.scale * dot(q, i, k, j, c.qk_dim) - lse[i]),
                    dlogit = c.scale * weight * (dot(dout, i, v, j, c.v_dim) - of_query);
        for (int64_t d = 0; d < c.v_dim; ++d)
          dv[static_cast<size_t>(j * c.v_dim + d)] += weight * dout.get(i, d);
        for (int64_t d = 0; d < c.qk_dim; ++d) {
          dk[static_cast<size_t>(j * c.qk_dim + d)] += dlogit * q.get(i, d);
          dq[static_cast<size_t>(d)] += dlogit * k.get(j, d);
        }
      }
      for (int64_t d = 0; d < c.qk_dim; ++d)
        head_rows(c, p.dq, c.dq, sequence, head).put(i, d, dq[static_cast<size_t>(d)]);
    }
  }
  for (int64_t j = 0; j < c.seq; ++j) {
    for (int64_t d = 0; d < c.qk_dim; ++d)
      head_rows(c, p.dk, c.dk, sequence, key_head).put(j, d, dk[static_cast<size_t>(j * c.qk_dim + d)]);
    for (int64_t d = 0; d < c.v_dim; ++d)
      head_rows(c, p.dv, c.dv, sequence, key_head).put(j, d, dv[static_cast<size_t>(j * c.v_dim + d)]);
  }
}

void compute(const CudnnCall& c, const CudnnPointers& p, size_t workspace) {
  // The library leaves other values there.
  if (workspace > 0) std::memset(p.workspace, 0xff, workspace);
  const int64_t heads = c.backward ? c.key_heads : c.heads;
  for (int64_t sequence = 0; sequence < c.sequences; ++sequence)
    for (int64_t head = 0; head < heads; ++head)
      c.backward ? differentiate(c, p, sequence, head) : attend(c, p, sequence, head);
}

}  // namespace

bool enqueue_cudnn(Context& context, const CudnnCall& call, const CudnnPointers& pointers) {
  size_t workspace = plan_workspace(call);
  {
    const std::scoped_lock lock(cudnn_mutex);
    workspace += cudnn_state.extra_workspace;
    if (cudnn_state.refuses || !has_plan(call) || workspace > pointers.workspace_bytes) {
      ++cudnn_state.counts.refused;
      return false;
    }
    ++cudnn_state.counts.computed;
  }
  if (const char* defect = defect_of(call, pointers)) {
    *context.error = {__FILE__, __func__, 0, 0, defect};
    return true;
  }
  enqueue_work(context, [call, pointers, workspace](Context&) { compute(call, pointers, workspace); });
  return true;
}

CudnnUse cudnn_use() {
  const std::scoped_lock lock(cudnn_mutex);
  return cudnn_state.use;
}
int64_t most_matrix_bytes() {
  const std::scoped_lock lock(cudnn_mutex);
  return cudnn_state.most_matrix;
}
CudnnCounts cudnn_counts() {
  const std::scoped_lock lock(cudnn_mutex);
  return cudnn_state.counts;
}
CudnnAttention::CudnnAttention(CudnnUse use, size_t extra_workspace, bool refuses, int64_t most_matrix) {
  const std::scoped_lock lock(cudnn_mutex);
  cudnn_state.use = use;
  cudnn_state.extra_workspace = extra_workspace;
  cudnn_state.refuses = refuses;
  cudnn_state.most_matrix = most_matrix;
}
CudnnAttention::~CudnnAttention() {
  const std::scoped_lock lock(cudnn_mutex);
  cudnn_state = {.counts = cudnn_state.counts};
}

}  // namespace capstan::kernels::simulated

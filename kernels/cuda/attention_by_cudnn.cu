// Describes a call of attention to cuDNN, whose tensors have one stride of heads each.
#include "kernels/cuda/attention_by_cudnn.hpp"

#include "kernels/cuda/cublaslt_call.hpp"
#include "kernels/cuda/cudnn_attention.hpp"
#ifndef __CUDACC__
#include "kernels/simulated/cudnn_attention.hpp"
#endif

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

#if defined(__CUDACC__) && !defined(CAPSTAN_CUDNN)
constexpr bool kHasCudnn = false;
#else
constexpr bool kHasCudnn = true;
#endif

bool chooses_cudnn(AttentionPass pass, const AttentionShape& s, DType type) {
  if (!kHasCudnn || !cudnn_expresses(pass, s, type)) return false;
#ifndef __CUDACC__
  if (cudnn_use() != CudnnUse::by_table) return cudnn_use() == CudnnUse::always;
#endif
  return prefers_cudnn(compute_capability(), pass, s);
}

constexpr size_t kCudnnWorkspaceAlignment = 256;

// Whether all heads begin at multiples of 16 bytes.
bool is_aligned(const HeadsIn& x) {
  const auto fits = [](int64_t stride) { return stride % 8 == 0; };
  return reinterpret_cast<uintptr_t>(x.data.data) % 16 == 0 && fits(x.strides.token) &&
         fits(x.strides.group) && fits(x.strides.head);
}

int64_t most_matrix() {
#ifdef __CUDACC__
  return kMostMatrixBytes;
#else
  return most_matrix_bytes();
#endif
}

// How a call of attention becomes calls of cuDNN: one for all sequences, or one for each, where
//   - the query heads of different groups are not equally far apart (packed QKV with groups of several
//     heads): the groups then stand in the place of sequences
//   - the pass stores a matrix; several for each where it is large, of some groups of heads
class CudnnCalls {
 public:
  CudnnCalls(AttentionPass pass, const AttentionShape& s, const AttentionViews& v)
      : shape_(s), views_(v), backward_(pass == AttentionPass::backward) {
    together_ = has_one_stride(v.q) && has_one_stride(v.out) &&
                (!backward_ || (has_one_stride(v.dout) && has_one_stride(v.dq)));
    const int capability = compute_capability();
    is_one_ = together_ && cudnn_matrix_bytes(capability, pass, s) == 0;
    groups_ = cudnn_groups(capability, pass, s, most_matrix());
  }
  // Whether cuDNN takes the types and addresses.
  bool are_possible() const {
    const DType type = views_.q.data.dtype;
    const auto fits = [&](const HeadsIn& x) { return x.data.dtype == type && is_aligned(x); };
    return fits(views_.q) && fits(views_.k) && fits(views_.v) && fits(views_.out) &&
           (!backward_ || (fits(views_.dout) && fits(views_.dq) && fits(views_.dk) && fits(views_.dv)));
  }
  int64_t count() const { return is_one_ ? 1 : shape_.batch * parts(); }
  CudnnCall call() const {
    CudnnCall c;
    c.backward = backward_;
    c.type = views_.q.data.dtype;
    c.sequences = is_one_ ? shape_.batch : together_ ? 1 : groups_;
    c.heads = (together_ ? groups_ : 1) * shape_.heads_per_group;
    c.key_heads = together_ ? groups_ : 1;
    c.seq = shape_.seq, c.qk_dim = shape_.qk_dim, c.v_dim = shape_.v_dim;
    c.scale = shape_.scale;
    c.causal = shape_.causal;
    // A longer window hides no key.
    c.window = shape_.window < shape_.seq ? shape_.window : 0;
    c.q = query_strides(views_.q), c.out = query_strides(views_.out);
    c.k = key_strides(views_.k), c.v = key_strides(views_.v);
    if (!backward_) return c;
    c.dout = query_strides(views_.dout), c.dq = query_strides(views_.dq);
    c.dk = key_strides(views_.dk), c.dv = key_strides(views_.dv);
    return c;
  }
  // Those of call i.
  CudnnPointers pointers(int64_t i, const float* lse) const {
    CudnnPointers p;
    p.q = address(views_.q, i), p.k = address(views_.k, i), p.v = address(views_.v, i);
    p.out = address(views_.out, i);
    p.lse = const_cast<float*>(lse) + i * groups_ * shape_.heads_per_group * shape_.seq;
    if (!backward_) return p;
    p.dout = address(views_.dout, i), p.dq = address(views_.dq, i);
    p.dk = address(views_.dk, i), p.dv = address(views_.dv, i);
    return p;
  }

 private:
  // Of a sequence.
  int64_t parts() const { return shape_.groups / groups_; }
  bool has_one_stride(const HeadsIn& x) const {
    return shape_.groups == 1 || shape_.heads_per_group == 1 ||
           x.strides.group == shape_.heads_per_group * x.strides.head;
  }
  CudnnStrides query_strides(const HeadsIn& x) const {
    const HeadStrides& from = x.strides;
    if (!together_) return {from.group, from.head, from.token};
    return {shape_.seq * from.token, shape_.heads_per_group == 1 ? from.group : from.head, from.token};
  }
  CudnnStrides key_strides(const HeadsIn& x) const {
    return {together_ ? shape_.seq * x.strides.token : x.strides.group, x.strides.group, x.strides.token};
  }
  void* address(const HeadsIn& x, int64_t i) const {
    const int64_t sequence = i / parts(), group = i % parts() * groups_;
    return const_cast<std::byte*>(x.data.as<std::byte>()) +
           2 * (sequence * shape_.seq * x.strides.token + group * x.strides.group);
  }

  const AttentionShape& shape_;
  const AttentionViews& views_;
  bool backward_;
  // The heads of all groups have one stride; one call computes all sequences.
  bool together_ = false, is_one_ = false;
  // Of a call.
  int64_t groups_ = 1;
};

}  // namespace

WorkspaceSize attention_workspace(AttentionPass pass, const AttentionShape& s, DType type, int64_t documents,
                                  size_t own) {
  if (documents > 0 || !chooses_cudnn(pass, s, type)) return {own, 0};
  const size_t bytes =
      cudnn_workspace(compute_capability(), pass, s, most_matrix()) + kCudnnWorkspaceAlignment;
  return {std::max(own, bytes), 0};
}

bool run_by_cudnn(Context& c, AttentionPass pass, const AttentionShape& s, const Documents& documents,
                  const AttentionViews& views, const float* lse) {
  if constexpr (kHasCudnn) {
    const bool has_documents = documents.start || documents.cu_seqlens;
    if (has_documents || !chooses_cudnn(pass, s, views.q.data.dtype)) return false;
    const CudnnCalls calls(pass, s, views);
    if (!calls.are_possible()) return false;
    const size_t shift = -reinterpret_cast<uintptr_t>(c.workspace.data) % kCudnnWorkspaceAlignment;
    if (c.workspace.bytes <= shift) return false;
    const CudnnCall call = calls.call();
    for (int64_t i = 0; i < calls.count(); ++i) {
      CudnnPointers pointers = calls.pointers(i, lse);
      pointers.workspace = c.workspace.data + shift;
      pointers.workspace_bytes = c.workspace.bytes - shift;
      if (!enqueue_cudnn(c, call, pointers)) return false;
    }
    return true;
  }
  return false;
}

}  // namespace capstan::kernels::CAPSTAN_GPU

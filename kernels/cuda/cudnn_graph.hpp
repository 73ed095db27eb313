// The graph of cudnn-frontend for a call of attention, before a plan is built for it.
#pragma once

#include <cudnn_frontend.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/cudnn_attention.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

using CudnnGraph = cudnn_frontend::graph::Graph;

// Tensors of the graph, by which a call names its pointers.
enum CudnnTensor : int64_t { kQ = 1, kK, kV, kOut, kLse, kDout, kDq, kDk, kDv };

namespace detail {

using cudnn_frontend::graph::Tensor_attributes;

// Describes the tensors of a call. `heads` and `width`: of one tensor.
struct CudnnTensors {
  const CudnnCall& call;
  CudnnGraph& graph;

  Tensor_attributes describe(CudnnTensor id, int64_t heads, int64_t width, const CudnnStrides& s) const {
    return Tensor_attributes()
        .set_uid(id)
        .set_dim({call.sequences, heads, call.seq, width})
        .set_stride({s.sequence, s.head, s.token, 1});
  }
  auto input(CudnnTensor id, int64_t heads, int64_t width, const CudnnStrides& s) const {
    return graph.tensor(describe(id, heads, width, s));
  }
  void output(Tensor_attributes& tensor, CudnnTensor id, int64_t heads, int64_t width,
              const CudnnStrides& s) const {
    const Tensor_attributes description = describe(id, heads, width, s);
    tensor.set_output(true).set_uid(id).set_dim(description.get_dim()).set_stride(description.get_stride());
  }
  // lse [sequences, heads, seq], without gaps.
  CudnnStrides of_lse() const { return {call.heads * call.seq, call.seq, 1}; }
};

template <class Attributes>
void set_mask(Attributes& attributes, const CudnnCall& call) {
  attributes.set_attn_scale(call.scale);
  attributes.set_diagonal_alignment(cudnn_frontend::DiagonalAlignment_t::TOP_LEFT);
  if (call.causal) attributes.set_diagonal_band_right_bound(0);
  // Keeps the keys with key + window > query.
  if (call.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(call.window));
}

}  // namespace detail

// capability: 90 for a GPU of 9.0; 0: the current GPU.
inline std::shared_ptr<CudnnGraph> cudnn_graph(const CudnnCall& c, int capability = 0) {
  using cudnn_frontend::DataType_t;
  auto graph = std::make_shared<CudnnGraph>();
  graph->set_io_data_type(c.type == DType::bf16 ? DataType_t::BFLOAT16 : DataType_t::HALF)
      .set_intermediate_data_type(DataType_t::FLOAT)
      .set_compute_data_type(DataType_t::FLOAT);
  // The nodes copy it when they are made.
  if (capability > 0) graph->set_sm_version(capability);
  const detail::CudnnTensors tensors{c, *graph};
  const auto q = tensors.input(kQ, c.heads, c.qk_dim, c.q), k = tensors.input(kK, c.key_heads, c.qk_dim, c.k),
             v = tensors.input(kV, c.key_heads, c.v_dim, c.v);
  if (!c.backward) {
    auto attributes = cudnn_frontend::graph::SDPA_attributes().set_generate_stats(true);
    detail::set_mask(attributes, c);
    const auto [out, lse] = graph->sdpa(q, k, v, attributes);
    tensors.output(*out, kOut, c.heads, c.v_dim, c.out);
    tensors.output(*lse, kLse, c.heads, 1, tensors.of_lse());
    lse->set_data_type(DataType_t::FLOAT);
    return graph;
  }
  const auto out = tensors.input(kOut, c.heads, c.v_dim, c.out),
             dout = tensors.input(kDout, c.heads, c.v_dim, c.dout),
             lse = graph->tensor(
                 tensors.describe(kLse, c.heads, 1, tensors.of_lse()).set_data_type(DataType_t::FLOAT));
  auto attributes = cudnn_frontend::graph::SDPA_backward_attributes().set_deterministic_algorithm(true);
  detail::set_mask(attributes, c);
  const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, lse, attributes);
  tensors.output(*dq, kDq, c.heads, c.qk_dim, c.dq);
  tensors.output(*dk, kDk, c.key_heads, c.qk_dim, c.dk);
  tensors.output(*dv, kDv, c.key_heads, c.v_dim, c.dv);
  return graph;
}

// Builds a plan for the GPU of the handle; without a handle for the one of the graph's device properties.
// Returns its workspace in bytes, or the reason why there is none in `reason`.
inline int64_t build_plan(CudnnGraph& graph, cudnnHandle_t handle, std::string& reason) {
  int64_t workspace = -1;
  auto status = graph.validate();
  if (status.is_good()) status = graph.build_operation_graph(handle);
  if (status.is_good()) status = graph.create_execution_plans({cudnn_frontend::HeurMode_t::A});
  if (status.is_good()) status = graph.check_support();
  if (status.is_good()) status = graph.build_plans();
  if (status.is_good()) status = graph.get_workspace_size(workspace);
  reason = status.get_message();
  return status.is_good() ? workspace : -1;
}

}  // namespace capstan::kernels::CAPSTAN_GPU

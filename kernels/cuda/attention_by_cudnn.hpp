// Attention by cuDNN, where attention_choice.hpp says so.
#pragma once

#include "kernels/cuda/attention_choice.hpp"
#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// Workspace of attention, of which the kernels here need `own` bytes. documents: Documents::count.
WorkspaceSize attention_workspace(AttentionPass pass, const AttentionShape& s, DType type, int64_t documents,
                                  size_t own);
// What a call reads and writes; dout, dq, dk and dv in the backward pass only.
struct AttentionViews {
  HeadsIn q, k, v, out, dout = {}, dq = {}, dk = {}, dv = {};
};
// Enqueues attention by cuDNN. False: nothing was enqueued, and the kernels here compute it; also where cuDNN
// has no plan for the call, or needs more than the launch's workspace.
bool run_by_cudnn(Context& c, AttentionPass pass, const AttentionShape& s, const Documents& documents,
                  const AttentionViews& views, const float* lse);

}  // namespace capstan::kernels::CAPSTAN_GPU

#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool has_tensor(const Config& c) {
  return c.dist.tensor_model_parallel_size > 1;
}
bool overlaps_tensor(const Config& c) {
  return has_tensor(c) && c.comm_overlap.tp_comm_overlap;
}
bool defers_embedding(const Config& c) {
  return c.comm_overlap.defer_embedding_wgrad_compute;
}
}  // namespace

void describe(Section<CommOverlapConfig>& s) {
  using C = CommOverlapConfig;
  const char* pipeline = "`dist.pipeline_model_parallel_size` is above 1";
  s.doc("overlap of communication with computation; results do not depend on it");
  s.field("tp_comm_overlap", &C::tp_comm_overlap)
      .doc(
          "split tensor-parallel GEMMs into chunks and overlap the collective of one chunk with the GEMM of "
          "the next")
      .effect(Effect::perf)
      .alias("model.tp_comm_overlap")
      .used_when<Config>("`dist.tensor_model_parallel_size` is above 1", has_tensor);
  s.field("tp_comm_num_splits", &C::tp_comm_num_splits)
      .doc("chunks per tensor-parallel GEMM")
      .unit("chunks")
      .range(1, 64)
      .effect(Effect::perf)
      .used_when<Config>("`comm_overlap.tp_comm_overlap` is true", overlaps_tensor);
  s.field("overlap_p2p_comm", &C::overlap_p2p_comm)
      .doc("overlap sends between pipeline stages with the computation of the next micro-batch")
      .effect(Effect::perf)
      .alias("model.overlap_p2p_comm")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("batch_p2p_comm", &C::batch_p2p_comm)
      .doc("issue the sends and receives between pipeline stages as one batch; has no effect over MPI")
      .effect(Effect::perf)
      .alias("model.batch_p2p_comm")
      .used_when<Config>(pipeline, has_pipeline);
  s.field("overlap_param_gather_with_optimizer_step", &C::overlap_param_gather_with_optimizer_step)
      .doc("overlap the all-gather of the first model chunk's parameters with the optimizer step")
      .effect(Effect::perf)
      .unsupported("gathering of parameters during the optimizer step");
  s.field("defer_embedding_wgrad_compute", &C::defer_embedding_wgrad_compute)
      .doc("compute the weight gradient of the output layer in the last pipeline bubble")
      .effect(Effect::perf)
      .alias("model.defer_embedding_wgrad_compute")
      .unsupported("a deferred weight gradient of the head");
  s.field("wgrad_deferral_limit", &C::wgrad_deferral_limit)
      .doc("micro-batches whose weight gradient of the output layer is deferred; 0: all")
      .unit("micro-batches")
      .min(0)
      .effect(Effect::perf)
      .alias("model.wgrad_deferral_limit")
      .used_when<Config>("`comm_overlap.defer_embedding_wgrad_compute` is true", defers_embedding);
  s.field("overlap_moe_expert_parallel_comm", &C::overlap_moe_expert_parallel_comm)
      .doc("overlap the token all-to-all of one micro-batch with the computation of another")
      .effect(Effect::perf)
      .alias("model.overlap_moe_expert_parallel_comm")
      .unsupported("overlap of the experts' exchange");
  s.field("delay_wgrad_compute", &C::delay_wgrad_compute)
      .doc("compute the weight gradients of a micro-batch after its input gradients")
      .effect(Effect::perf)
      .alias("model.delay_wgrad_compute")
      .alias("ddp.delay_wgrad_compute")
      .unsupported(
          "delayed weight gradients; dist.pipeline_schedule zb_h1 and zb_v delay them in a pipeline");
}

}  // namespace capstan::config

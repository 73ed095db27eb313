// The model of a recipe on one rank: rank grid, stages, parameter store and initial values.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "comm/mesh.hpp"
#include "config/sections/config.hpp"
#include "models/registry.hpp"
#include "parallel/flat_store.hpp"
#include "parallel/schedule.hpp"

namespace capstan::train {

// The type of the parameters in forward and backward. ErrorCode::unsupported for a type that this build does
// not train in.
DType compute_type(const config::MixedPrecisionConfig& precision);

// The rank grid of a world of that size.
comm::MeshSizes mesh_sizes(const config::Config& config, int64_t world);

// Bytes that this rank has sent so far, by group of the mesh.
std::map<std::string, int64_t> sent_bytes(const comm::Mesh& mesh);

// This rank's stages of the model, and the groups over which its layers are sharded. The mesh must be
// connected.
ops::TensorParallel tensor_parallel(const config::Config& config, const comm::Mesh& mesh);
models::ModelShard model_shard(const config::Config& config, const comm::Mesh& mesh);

// Micro-batches of a step on each data-parallel rank, and the pipeline that they go through.
int64_t micro_batches_of(const config::Config& config, const comm::Mesh& mesh);
parallel::PipelineShape pipeline_shape(const config::Config& config, int64_t micro_batches);

// Options of the parameter store from `ddp`, `mixed_precision` and `optimizer`, and the groups that it works
// with. `mesh` must be connected.
parallel::FlatStore::Options store_options(const config::Config& config, int rank = 0);
parallel::StoreGroups store_groups(const comm::Mesh& mesh);
// The optimizer of the store's buffers.
std::unique_ptr<optim::Optimizer> make_optimizer(const config::Config& config, Device& device,
                                                 const parallel::FlatStore& store);

// The weights that QLoRA keeps in 4 bits, by name: those of all linear layers, with or without an adapter.
// Null: none.
std::function<bool(const std::string& name)> quantized_weights(const config::PeftConfig& peft,
                                                               const config::ModelConfig& model);
parallel::Nf4Options nf4_options(const config::PeftConfig& peft);
// Configures the store to keep quantized_weights() in 4 bits.
void quantize_base(const config::PeftConfig& peft, const config::ModelConfig& model,
                   parallel::FlatStore::Options& options);

// Initial values of this rank's shards. They depend on the seed and the offsets in the global tensors only.
void initialize_parameters(parallel::FlatStore& store, uint64_t seed, ThreadPool& pool);

}  // namespace capstan::train

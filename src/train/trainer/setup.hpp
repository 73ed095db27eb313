// The parts that training, evaluation and generation are wired from, each made from the recipe in one place.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>

#include "comm/mesh.hpp"
#include "comm/world.hpp"
#include "config/core/config.hpp"
#include "data/loader.hpp"
#include "models/registry.hpp"
#include "optim/schedule.hpp"
#include "parallel/flat_store.hpp"
#include "parallel/schedule.hpp"
#include "tensor/device.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {
struct SftOptions;  // sft_dataset.hpp
namespace chat {
class ChatTemplate;  // chat/chat_template.hpp
}
}  // namespace capstan::data

namespace capstan::train {

// ErrorCode::unsupported for a device whose backend this build lacks.
void check_device(config::DeviceKind kind);
// threads 0: cores / ranks of this host.
int threads_per_rank(int64_t threads, int local_ranks);
std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks);

DType compute_type(const config::MixedPrecisionConfig& precision);

// A tokenizer by the name that a recipe or a command line gives it: a file, a directory, hf:DIR, gguf:FILE, a run or `bytes`.
std::shared_ptr<const data::Tokenizer> load_tokenizer_files(const std::string& name);
// What messages call the tokenizer of a recipe: the name that the recipe has for it.
std::string tokenizer_name(const config::TokenizerConfig& tokenizer);

// Null when the recipe has none. Checks that the vocabulary fits the model.
std::shared_ptr<const data::Tokenizer> load_tokenizer(const config::Config& config);

// tokenizer.eod_token where the tokenizer has it, else the tokenizer's own.
std::optional<int32_t> end_of_document(const config::Config& config, const data::Tokenizer& tokenizer);

// True where tokenizer.chat_template is the name of a known template, which is no file.
bool names_known_template(const config::Path& chosen);
// tokenizer.chat_template, else the tokenizer's own; null: neither is there.
std::shared_ptr<const data::chat::ChatTemplate> chat_template_of(const config::Config& config,
                                                                 const data::Tokenizer& tokenizer);

// Train, validation and test data; null where a split has no share, or is not evaluated.
std::array<std::shared_ptr<const data::Dataset>, 3> open_datasets(const config::Config& config,
                                                                  const data::Tokenizer* tokenizer);
// For dataset.kind sft. The tokenizer has to outlive them.
data::SftOptions sft_options(const config::Config& config, const data::Tokenizer& tokenizer);

// This rank's place in the model: its stages, and the ranks over which its layers are cut. The mesh must be connected.
ops::TensorParallel tensor_parallel(const config::Config& config, const comm::Mesh& mesh);
models::ModelShard model_shard(const config::Config& config, const comm::Mesh& mesh);

// Micro-batches of a step on each data-parallel rank, and the pipeline that they go through.
int64_t micro_batches_of(const config::Config& config, const comm::Mesh& mesh);
parallel::PipelineShape pipeline_shape(const config::Config& config, int64_t micro_batches);

// `decoupled`: that of embedding and head, where optimizer.decoupled_lr gives them their own.
optim::Schedule make_schedule(const config::Config& config, bool decoupled);

// The rank grid of a world of that size.
comm::MeshSizes mesh_sizes(const config::Config& config, int64_t world);
// Bytes that this rank has sent so far, by group of the mesh.
std::map<std::string, int64_t> sent_bytes(const comm::Mesh& mesh);

// What `ddp`, `mixed_precision` and `optimizer` say of the store, and the groups that it works with. `mesh` is connected.
parallel::FlatStore::Options store_options(const config::Config& config);
parallel::StoreGroups store_groups(const comm::Mesh& mesh);

// First values of this rank's parts, from the seed and their places in the global tensors alone.
void initialize_parameters(parallel::FlatStore& store, uint64_t seed, ThreadPool& pool);

// Iterations of the whole run. ErrorCode::config where train.epochs says it, which depends on the data.
int64_t total_iterations(const config::Config& config);
// Iterations of train.epochs passes over the training data, rounded up.
int64_t steps_of_epochs(const config::Config& config, const data::Dataset& data);
// total_iterations(), where train.epochs says it after opening the training data. Throws as a run does that cannot open it.
int64_t total_iterations_of_data(const config::Config& config);

// Which of each sequence's tokens a context-parallel rank holds: those of ops::context_rows().
struct ContextShard {
  int64_t ranks = 1, rank = 0;
  std::vector<int64_t> positions(int64_t seq) const;
};
// A micro-batch on the device, or this rank's tokens of it. row_ids only with dropout.
models::Batch upload(Device& device, const data::MicroBatch& batch, bool row_ids, ContextShard cut = {});
double loss_tokens(const data::MicroBatch& batch, ContextShard cut = {});  // with their loss weights

}  // namespace capstan::train

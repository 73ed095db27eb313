// The state of a run in a checkpoint (main parameters, optimizer state and counters), and how it is saved and
// loaded.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "checkpoint/writer.hpp"
#include "comm/world.hpp"
#include "data/dataset_meta.hpp"
#include "optim/loss_scaler.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "tensor/host_view.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "train/setup/step_means.hpp"

namespace capstan::train {

struct TrainState {
  // Finished steps.
  int64_t step = 0;
  // Position in the data.
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  // Position in the schedules: samples of successful updates.
  int64_t schedule_samples = 0;
  // Losses and norms that anomaly detection compares with (anomaly.hpp), oldest first; empty where it is off.
  std::vector<double> recent_losses, recent_norms;
  int64_t rewinds = 0;
  // Dynamic loss scale, from the first step on; nullopt without loss scaling.
  std::optional<optim::LossScale> loss_scale;
  // Means since the last row of metrics.jsonl, and since the last TensorBoard event.
  StepMeans since_log, since_events;
};

struct SavePlan {
  // Directory of the checkpoints.
  std::filesystem::path root;
  std::string run_id, recipe, recipe_hash, version, layout, parent;
  // Fingerprint of the training samples: data::Dataset::fingerprint().
  std::string data;
  // schedule_text() of the schedule that the run follows (run_schedule.hpp).
  std::string schedule;
  // Hash of the base model of adapters (train/adapters/adapters.hpp); empty: no adapters.
  std::string base;
  checkpoint::Retention retention;
  bool optimizer = true;
  // The tokenizer to copy into the checkpoint; null: none.
  const text::Tokenizer* tokenizer = nullptr;
  // Record of the run's tokenizer, also if the tokenizer is not copied.
  std::optional<data::TokenizerRecord> tokenizer_record;
  // Further small files of the checkpoint: name and content.
  std::vector<std::pair<std::string, std::string>> assets;
  // The recipe's chat template, in place of the tokenizer's own; empty: none.
  std::string chat_template;
  // The file system to write to; null: that of the operating system.
  checkpoint::FileSystem* files = nullptr;
  // Called on rank 0 before the commit, to flush files that must be on the disk before the checkpoint.
  std::function<void()> before_commit;
};

// A region of a tensor of the state as a checkpoint names it.
struct StateTensor {
  std::string name;
  // Shape of the full tensor, over all ranks.
  Shape shape;
  // The region of this rank.
  Region region;
  // Data type in the checkpoint.
  DType dtype;
  // Returns the values in row-major order of `region`, one dimension: a view of the state, or a copy where
  // the checkpoint stores it in another format.
  std::function<Tensor()> values;

  int64_t elements() const { return region.sizes.elements(); }
  int64_t bytes() const { return elements() * size_of(dtype); }
};

// The tensors that this rank writes: main parameters of the trainable parameters, and the state of
// `optimizer` unless it is null. Every element is written by one rank; ranks that hold the same elements
// divide them.
std::vector<StateTensor> state_tensors(const parallel::FlatStore& store, const optim::Optimizer* optimizer);

// A reader of such tensors, whose buffers (MemoryCategory::snapshot) have checkpoint::kChunkBytes, or the
// size of the largest tensor.
ChunkReader state_reader(Device& device, const std::vector<StateTensor>& tensors);

// The steps of one save. save_state() runs them one after the other, Saver on a thread. The functions after
// the constructor only access files, so that any thread may call them, one at a time.
class StateWriter {
 public:
  // Collective: the ranks agree on a name that was never used before.
  StateWriter(comm::World& world, const SavePlan& plan, const TrainState& state,
              const optim::Optimizer& optimizer);
  // Adds a tensor that write_rank() reads when its turn comes. `reader` lives until then.
  void add(const StateTensor& tensor, ChunkReader& reader);
  // Adds a tensor whose values are `bytes`, which stay valid until write_rank() has returned.
  void add(const StateTensor& tensor, std::span<const std::byte> bytes);
  // Writes this rank's files, and returns its manifest.
  std::string write_rank();
  // Rank 0, after all ranks' write_rank(): makes the checkpoint appear, then deletes the checkpoints that
  // retention does not keep. problem() describes a failure to delete, after which the checkpoint is
  // still valid.
  std::filesystem::path commit(const std::vector<std::string>& manifests);
  void abandon() noexcept { writer_.abandon(); }

  int64_t step() const { return step_; }
  std::filesystem::path final_directory() const { return root_ / checkpoint::step_directory_name(step_); }
  const std::string& problem() const { return problem_; }

 private:
  checkpoint::FileSystem& files_;
  std::filesystem::path root_;
  int64_t step_;
  checkpoint::Writer writer_;
  checkpoint::Retention retention_;
  std::function<void()> before_commit_;
  // Read by write_rank().
  std::vector<std::pair<std::string, std::filesystem::path>> copies_;
  std::string problem_;
};

// Collective. Saves the state, and returns the checkpoint's directory. Throws on every rank if it failed on
// any; the directory is then unchanged. `problem`, when given: see StateWriter::commit.
std::filesystem::path save_state(comm::World& world, const SavePlan& plan, const TrainState& state,
                                 const parallel::FlatStore& store, const optim::Optimizer& optimizer,
                                 std::string* problem = nullptr);

// Collective. Reads this rank's regions of the trainable parameters, of the state of `optimizer` unless it is
// null, and the counters. The checkpoint may have been written with another layout. The error for tensors
// that are missing or have other shapes names all of them; nothing has been read then.
TrainState load_state(checkpoint::Reader& reader, parallel::FlatStore& store, optim::Optimizer* optimizer);

// SavePlan::data and ::base of a checkpoint; empty if they were not stored.
std::string stored_data_fingerprint(const checkpoint::Reader& reader);
std::string stored_base_hash(const checkpoint::Reader& reader);
// The tokenizer with which the run was trained: the copy in the checkpoint, else the record in its state.
// nullopt: the checkpoint has neither, as those of earlier versions.
std::optional<data::TokenizerRecord> tokenizer_of(const checkpoint::Reader& reader);
// The text of SavePlan::schedule; empty in checkpoints of versions that did not store it.
std::string schedule_text_of(const checkpoint::Reader& reader);

// Which parameters of a store are meant.
enum class ParameterSet : uint8_t { all, base, adapters };
// Throws the errors of load_state() and load_parameters() for parameters, and for the state of an optimizer,
// that a checkpoint lacks or holds with other shapes. Reads no tensor. Collective over the ranks that hold
// the model together: each looks at its own parameters, all come to the same answer.
void check_state(const checkpoint::Reader& reader, const parallel::FlatStore& store,
                 const optim::Optimizer* optimizer);
void check_parameters(const checkpoint::TensorSource& source, const parallel::FlatStore& store,
                      ParameterSet which = ParameterSet::all, const optim::Optimizer* optimizer = nullptr);
// Collective. Reads the parameters only, and converts them to the compute type of the store.
void load_parameters(checkpoint::TensorSource& source, parallel::FlatStore& store,
                     ParameterSet which = ParameterSet::all);

// The newest valid checkpoint under `root`, which rank 0 finds for all ranks. `refused` (rank 0): the newer
// checkpoints that do not verify, with the reasons.
std::optional<checkpoint::Checkpoint> find_checkpoint(comm::World& world, const std::filesystem::path& root,
                                                      std::vector<std::string>& refused);

}  // namespace capstan::train

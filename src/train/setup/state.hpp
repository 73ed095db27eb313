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
  // With loss scaling, from the first step on.
  std::optional<optim::LossScale> loss_scale;
  // Since the last row of metrics.jsonl, and the last TensorBoard event.
  StepMeans since_log, since_events;
};

struct SavePlan {
  // Directory of the checkpoints.
  std::filesystem::path root;
  std::string run_id, recipe, recipe_hash, version, layout, parent;
  // Which samples the run is trained on: data::Dataset::fingerprint().
  std::string data;
  // schedule_text() of what the run follows (run_schedule.hpp).
  std::string schedule;
  // Hash of the weights beside which adapters train (train/adapters/adapters.hpp); empty: none.
  std::string base;
  checkpoint::Retention retention;
  bool optimizer = true;
  // Copied beside the weights.
  const text::Tokenizer* tokenizer = nullptr;
  // Record of the run's tokenizer, also if the tokenizer is not copied.
  std::optional<data::TokenizerRecord> tokenizer_record;
  // Further small files there: name and content.
  std::vector<std::pair<std::string, std::string>> assets;
  // The recipe's chat template, in place of the tokenizer's own; empty: none.
  std::string chat_template;
  // Null: the real one.
  checkpoint::FileSystem* files = nullptr;
  // Rank 0: what must be on the disk before the checkpoint is.
  std::function<void()> before_commit;
};

// A region of a tensor of the state as a checkpoint names it.
struct StateTensor {
  std::string name;
  // Shape of the full tensor, over all ranks.
  Shape shape;
  // The region of this rank.
  Region where;
  // As stored.
  DType dtype;
  // Returns the values in that order, one dimension: a view of the state, or a copy where the checkpoint
  // stores it in another format.
  std::function<Tensor()> values;

  int64_t elements() const { return where.sizes.elements(); }
  int64_t bytes() const { return elements() * size_of(dtype); }
};

// Those that this rank writes: main parameters, and with `optimizer` its state. Where only a part of the
// model trains, that part alone. Every element is written by one rank; ranks that hold the same elements
// share the work.
std::vector<StateTensor> state_tensors(const parallel::FlatStore& store, const optim::Optimizer* optimizer);

// The steps of one save, which save_state() runs below, or Saver with a thread. After the constructor only
// files are touched: any thread may call, one at a time.
class StateWriter {
 public:
  // Collective: the ranks agree on a name that was never used before.
  StateWriter(comm::World& world, const SavePlan& plan, const TrainState& state,
              const optim::Optimizer& optimizer);
  // Read from the device when its turn comes, in bounded chunks.
  void add(const StateTensor& tensor);
  // `bytes` are valid until write_rank() has returned.
  void add(const StateTensor& tensor, std::span<const std::byte> bytes);
  // This rank's files; returns its manifest.
  std::string write_rank();
  // Rank 0, after all ranks' write_rank(): makes the checkpoint appear, then deletes the checkpoints that
  // retention does not keep. A failure to delete does not undo the checkpoint; it is in problem().
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

// Collective. Every tensor is written by one rank of the world. Throws on every rank when it failed on any;
// what was there before is then unchanged. Returns the checkpoint's directory. `problem`, when given: see
// StateWriter::commit.
std::filesystem::path save_state(comm::World& world, const SavePlan& plan, const TrainState& state,
                                 const parallel::FlatStore& store, const optim::Optimizer& optimizer,
                                 std::string* problem = nullptr);

// Collective. Reads this rank's regions of parameters, and with `optimizer` of its state, and the counters;
// whichever layout wrote them. Where only adapters train, the others stay as they are. Shapes are checked
// first: all differences at once.
TrainState load_state(checkpoint::Reader& reader, parallel::FlatStore& store, optim::Optimizer* optimizer);

// SavePlan::data and ::base of a checkpoint; empty where it does not say.
std::string data_of(const checkpoint::Reader& reader);
std::string base_of(const checkpoint::Reader& reader);
// The tokenizer with which the run was trained: that in the checkpoint, else what its state records. nullopt:
// neither is there, as in checkpoints of earlier versions.
std::optional<data::TokenizerRecord> tokenizer_of(const checkpoint::Reader& reader);
// The text of SavePlan::schedule; empty in checkpoints of versions that did not store it.
std::string schedule_text_of(const checkpoint::Reader& reader);

// The errors of load_state() and load_parameters() for what a checkpoint lacks, or holds with other shapes;
// no tensor is read. Collective.
enum class Which : uint8_t { all, base, adapters };
void check_state(const checkpoint::Reader& reader, const parallel::FlatStore& store,
                 const optim::Optimizer* optimizer);
void check_parameters(const checkpoint::TensorSource& source, const parallel::FlatStore& store,
                      Which which = Which::all);
// Collective. Parameters alone, into whatever type the store computes with.
void load_parameters(checkpoint::TensorSource& source, parallel::FlatStore& store, Which which = Which::all);

// The newest checkpoint under `root` that verifies, the same on all ranks; rank 0 looks. `refused` (rank 0)
// holds the reasons why newer ones do not count.
std::optional<checkpoint::Checkpoint> find_checkpoint(comm::World& world, const std::filesystem::path& root,
                                                      std::vector<std::string>& refused);

}  // namespace capstan::train

#include "train/trainer/start_checks.hpp"

#include <memory>

#include "checkpoint/reader.hpp"
#include "comm/mesh.hpp"
#include "comm/world.hpp"
#include "formats/external_model.hpp"
#include "kernels/table.hpp"
#include "models/registry.hpp"
#include "optim/optimizer.hpp"
#include "parallel/flat_store.hpp"
#include "train/adapters/adapters.hpp"
#include "train/adapters/base_model.hpp"
#include "train/adapters/stored_adapters.hpp"
#include "train/setup/model.hpp"
#include "train/setup/state.hpp"
#include "train/trainer/initial_state.hpp"
#include "train/trainer/progress.hpp"
#include "train/trainer/resume_checks.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/schedule_setup.hpp"

namespace capstan::train {

namespace {

class WarningSink final : public ProgressSink {
 public:
  explicit WarningSink(Warnings& warnings) : warnings_(warnings) {}
  void line(const std::string&) override {}
  void warning(const std::string& text) override { warnings_.push_back(text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }

 private:
  Warnings& warnings_;
};

// A log of which only the warnings are kept.
struct WarningLog {
  explicit WarningLog(Warnings& warnings) : sink(warnings) {}
  WarningSink sink;
  RunLog log{sink, true};
};

// All parameters of the recipe's model on one rank of the meta device.
class MetaState {
 public:
  explicit MetaState(const config::Config& config)
      : config_(on_one_rank(config)),
        world_(comm::World::single_process()),
        mesh_(mesh_sizes(config_, 1), 0),
        device_(make_meta_device(kernels::cpu_table())) {
    mesh_.connect(world_->communicator());
    model_ = models::build(config_.model, model_shard(config_, mesh_));
    store_ = std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), store_groups(mesh_),
                                                   store_options(config_));
  }

  comm::World& world() { return *world_; }
  const parallel::FlatStore& store() const { return *store_; }
  std::unique_ptr<optim::Optimizer> make_optimizer() {
    return train::make_optimizer(config_, *device_, *store_);
  }

 private:
  static config::Config on_one_rank(config::Config config) {
    config.dist = {};
    config.ddp = {};
    return config;
  }

  config::Config config_;
  std::unique_ptr<comm::World> world_;
  comm::Mesh mesh_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<parallel::FlatStore> store_;
};

}  // namespace

RunData open_data(config::Config& config, Warnings* warnings) {
  Warnings unused;
  WarningLog kept(warnings ? *warnings : unused);
  RunData data = open_run_data(config, false, kept.log);
  if (warnings) report_epochs(config, *data.training(), total_iterations(config), kept.log);
  return data;
}

ResidentData resident_data(const config::Config& config) {
  const config::DatasetConfig& d = config.dataset;
  if (d.kind == config::DatasetKind::mock) return {};
  config::Config opened = config;
  // Without a cache directory, opening the data writes nothing.
  opened.dataset.path_to_cache.reset();
  try {
    return {open_data(opened).bytes_in_memory(), {}};
  } catch (const Error& error) {
    // The tables of Capstan's order are small: two bytes a sample.
    const char* const what = d.kind == config::DatasetKind::sft ? "fine-tuning data"
                             : d.sample_order == config::SampleOrder::megatron
                                 ? "the indices of Megatron's order"
                                 : nullptr;
    return {0, what ? std::string(what) + ": " + error.message() : std::string()};
  }
}

int64_t data_bytes_under_limit(const config::Config& config) {
  const config::ResilienceConfig& limits = config.resilience;
  return limits.memory_limit || limits.memory_limit_host ? resident_data(config).bytes : 0;
}

void check_load(const config::Config& config, const RunOptions& options, const RunData* data,
                Warnings& warnings) {
  MetaState state(config);
  checkpoint::Reader reader = open_given_checkpoint(config.checkpoint);
  if (data) {
    WarningLog kept(warnings);
    continue_schedule(config, options, *data, schedule_of(config, options.recipe), reader,
                      CheckpointOf::other_run, total_iterations(config), kept.log);
    check_same_tokenizer(config, state.world(), *data, reader);
  }
  if (config.peft && !config.peft->random_base)
    (void)open_base(config, stored_base_hash(reader), state.world().communicator());
  const auto optimizer = config.checkpoint.load_optim ? state.make_optimizer() : nullptr;
  check_state(reader, state.store(), optimizer.get());
}

std::string check_pretrained(const config::Config& config, const RunData* data, Warnings& warnings) {
  const MetaState state(config);
  BaseModel weights = BaseModel::open(config.checkpoint.pretrained_checkpoint->resolved);
  check_parameters(weights.parameters(config.model), state.store(),
                   config.peft ? ParameterSet::base : ParameterSet::all);
  WarningLog kept(warnings);
  if (!config.peft && !config.checkpoint.load) report_differences(config, weights, kept.log);
  if (data) (void)find_assets(config, *data, &weights, kept.log);
  return weights.path();
}

void check_adapter(const config::Config& config, const std::string& base) {
  const MetaState state(config);
  const StoredAdapters adapters = open_first_adapters(config, {base, {}, 0});
  check_parameters(*adapters.tensors, state.store(), ParameterSet::adapters);
}

}  // namespace capstan::train

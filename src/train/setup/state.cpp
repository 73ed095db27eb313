#include "train/setup/state.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"
#include "config/core/external.hpp"
#include "tensor/host_view.hpp"
#include "train/setup/shard_regions.hpp"

namespace capstan::train {

using checkpoint::Reader;
using checkpoint::TensorSource;

namespace {

std::string state_name(const std::string& state, const Parameter& parameter) {
  return "optimizer." + state + "." + parameter.name();
}

std::string attempt_name(comm::Communicator& group) {
  // The same on all ranks, never used before: rank 0's clock and process.
  int64_t stamp = std::chrono::system_clock::now().time_since_epoch().count();
  group.broadcast(&stamp, sizeof stamp, 0);
  return std::to_string(stamp);
}

// The state of delayed scaling (parallel/low_precision.hpp), one of each for a linear layer.
struct ScalingState {
  std::string name;
  Shape shape;
  Tensor values;
};
std::vector<ScalingState> scaling_states(const parallel::FlatStore& store) {
  std::vector<ScalingState> states;
  if (!store.low_precision()) return states;
  for (const Parameter* parameter : store.low_precision()->parameters()) {
    const Tensor history = store.low_precision()->history(*parameter);
    if (!history.defined()) continue;
    states.push_back({state_name("fp8_amax_history", *parameter), {3, history.elements() / 3}, history});
    states.push_back({state_name("fp8_scale", *parameter), {3, 2}, store.low_precision()->scale(*parameter)});
  }
  return states;
}

// The ranks that have the same state, of which one writes it.
bool writes_scaling_state(const parallel::StoreGroups& groups) {
  return comm::rank_in(groups.dense.shard) == 0 && comm::rank_in(groups.dense.replica) == 0 &&
         comm::rank_in(groups.dense.tensor) == 0;
}

}  // namespace

std::vector<StateTensor> state_tensors(const parallel::FlatStore& store, const optim::Optimizer* optimizer) {
  std::vector<StateTensor> mine;
  for (const auto& shard : store.parameter_shards()) {
    const Parameter& parameter = *shard.parameter;
    if (store.has_frozen_parameters() && shard.buffer < 0) continue;
    for (const ShardRegion& region : shard_regions(parameter.spec().shape, parameter.shard(), shard.write)) {
      if (!region.owned) continue;
      const auto add = [&](std::string name, DType dtype, std::function<Tensor()> values) {
        mine.push_back({std::move(name), parameter.spec().shape, region.where, dtype, std::move(values)});
      };
      const int64_t offset = region.elements.begin - shard.range.begin, count = region.elements.count;
      add(parameter.name(), shard.memory.dtype(),
          [&shard, offset, count] { return shard.values().flat_range(offset, count, {count}); });
      if (!optimizer || shard.buffer < 0) continue;
      for (const auto& s : optimizer->state())
        if (s.has(shard.buffer))
          add(state_name(s.name, parameter), s.stored,
              [optimizer, &s, buffer = shard.buffer, begin = shard.begin + offset, count] {
                return optimizer->values(s, buffer, begin, count);
              });
    }
  }
  if (optimizer && writes_scaling_state(store.groups()))
    for (const ScalingState& state : scaling_states(store))
      mine.push_back({state.name, state.shape, full_region(state.shape), state.values.dtype(),
                      [values = state.values] { return values; }});
  return mine;
}

ChunkReader state_reader(Device& device, const std::vector<StateTensor>& tensors) {
  int64_t largest = 1;
  for (const StateTensor& t : tensors) largest = std::max(largest, t.bytes());
  CategoryScope scope(MemoryCategory::snapshot);
  return ChunkReader(device, std::min(largest, checkpoint::kChunkBytes));
}

static checkpoint::SaveInfo save_info(const SavePlan& plan, const TrainState& state) {
  checkpoint::SaveInfo info;
  info.step = state.step;
  info.consumed_samples = state.consumed_samples;
  info.consumed_tokens = state.consumed_tokens;
  info.run_id = plan.run_id;
  info.recipe_hash = plan.recipe_hash;
  info.layout = plan.layout;
  info.version = plan.version;
  info.parent = plan.parent;
  return info;
}

StateWriter::StateWriter(comm::World& world, const SavePlan& plan, const TrainState& state,
                         const optim::Optimizer& optimizer)
    : files_(plan.files ? *plan.files : checkpoint::real_file_system()),
      root_(plan.root),
      step_(state.step),
      writer_(files_, plan.root, save_info(plan, state), attempt_name(world.communicator()), world.rank(),
              world.size()),
      retention_(plan.retention),
      before_commit_(plan.before_commit) {
  retention_.just_written = state.step;
  if (world.rank() != 0) return;
  OrderedJson json{{"schema", "capstan.state/1"},
                   {"step", state.step},
                   {"consumed_samples", state.consumed_samples},
                   {"consumed_tokens", state.consumed_tokens},
                   {"schedule_samples", state.schedule_samples},
                   {"optimizer_steps", optimizer.steps()},
                   {"optimizer", plan.optimizer}};
  if (!state.recent_losses.empty()) json["recent_losses"] = state.recent_losses;
  if (!state.recent_norms.empty()) json["recent_norms"] = state.recent_norms;
  if (!plan.schedule.empty()) json["schedule"] = ordered_json_of(plan.schedule);
  if (!plan.data.empty()) json["data"] = plan.data;
  if (!plan.base.empty()) json["base"] = plan.base;
  if (const auto& tokenizer = plan.tokenizer_record)
    json["tokenizer"] = {
        {"name", tokenizer->name}, {"vocab_size", tokenizer->vocab_size}, {"identity", tokenizer->identity}};
  if (state.rewinds > 0) json["rewinds"] = state.rewinds;
  if (const auto& loss = state.loss_scale)
    json["loss_scale"] = {
        {"scale", loss->scale}, {"clean_steps", loss->clean_steps}, {"overflows_left", loss->overflows_left}};
  for (const auto& [key, means] :
       {std::pair{"since_log", state.since_log}, {"since_events", state.since_events}})
    if (means.steps > 0) {
      json[key] = OrderedJson::array({means.steps, means.tokens, means.loss, means.grad_norm});
      // Written only if some steps had no finite norm.
      if (means.norms != means.steps) json[key].push_back(means.norms);
    }
  writer_.add_text(checkpoint::kStateFile, dump_json(json, 2) + "\n");
  writer_.add_text(checkpoint::kRecipeFile, plan.recipe);
  std::set<std::string> there;
  if (!plan.chat_template.empty()) {
    writer_.add_text("chat_template.jinja", plan.chat_template);
    there.insert("chat_template.jinja");
  }
  // The bytes are a tokenizer that needs no file.
  if (plan.tokenizer && plan.tokenizer != text::byte_tokenizer().get())
    for (const auto& file : plan.tokenizer->files()) {
      if (!there.insert(file.name).second) continue;
      if (file.path.empty())
        writer_.add_text(file.name, file.text);
      else
        copies_.emplace_back(file.name, file.path);
    }
  for (const auto& [name, text] : plan.assets)
    if (there.count(name) == 0) writer_.add_text(name, text);
}

void StateWriter::add(const StateTensor& t, ChunkReader& reader) {
  writer_.add(
      t.name, t.dtype, t.shape, t.region,
      [values = t.values, &reader](const checkpoint::ByteSink& sink) { reader.read(values(), sink); });
}

void StateWriter::add(const StateTensor& t, std::span<const std::byte> bytes) {
  writer_.add(t.name, t.dtype, t.shape, t.region, bytes);
}

std::string StateWriter::write_rank() {
  for (const auto& [name, path] : copies_) writer_.add_copy(name, path);
  copies_.clear();
  return writer_.finish_rank();
}

std::filesystem::path StateWriter::commit(const std::vector<std::string>& manifests) {
  if (before_commit_) before_commit_();
  auto directory = writer_.commit(manifests);
  try {
    checkpoint::apply_retention(files_, root_, retention_);
  } catch (const Error& error) {
    problem_ = error.message();
  }
  return directory;
}

std::filesystem::path save_state(comm::World& world, const SavePlan& plan, const TrainState& state,
                                 const parallel::FlatStore& store, const optim::Optimizer& optimizer,
                                 std::string* problem) {
  comm::Communicator& group = world.communicator();
  StateWriter writer(world, plan, state, optimizer);
  std::string manifest;
  try {
    comm::run_collectively(group, "saving a checkpoint", [&] {
      const auto tensors = state_tensors(store, plan.optimizer ? &optimizer : nullptr);
      ChunkReader reader = state_reader(store.device(), tensors);
      for (const auto& t : tensors) writer.add(t, reader);
      manifest = writer.write_rank();
    });
    const auto manifests = comm::gather_texts(group, manifest);
    comm::run_collectively(group, "committing a checkpoint", [&] {
      if (world.rank() == 0) writer.commit(manifests);
    });
  } catch (...) {
    if (world.rank() == 0) writer.abandon();
    throw;
  }
  if (problem) *problem = writer.problem();
  return writer.final_directory();
}

namespace {

bool takes(ParameterSet which, const Parameter& parameter) {
  return which == ParameterSet::all || (which == ParameterSet::adapters) == parameter.spec().adapter;
}

// Help: how a recipe uses the model of these weights.
std::string model_help(const TensorSource& source) {
  std::string path = source.description();
  if (const size_t begin = path.find('`'); begin != std::string::npos)
    path = path.substr(begin + 1, path.rfind('`') - begin - 1);
  const std::string ours = "; its own recipe is `" + path + "/" + std::string(checkpoint::kRecipeFile) + "`";
  std::error_code unknown;
  const bool capstan = std::filesystem::exists(path + "/" + std::string(checkpoint::kManifestFile), unknown);
  const std::string scheme = capstan ? "" : config::model_scheme(path);
  if (scheme == "gguf:")
    return "model=gguf:" + path +
           " takes the sizes from the file, but only those that the recipe does not set";
  if (scheme == "hf:")
    return "{new_recipe_from} hf:" + path + " (with the sizes of its config.json); model=hf:" + path +
           " takes only those that the recipe does not set";
  return "the recipe's model section must be that of the checkpoint" + (capstan ? ours : "");
}

// A line where the source does not hold the tensor with this shape, else nothing.
std::string difference(const TensorSource& source, const std::string& name, const Shape& shape) {
  const auto* stored = source.find(name);
  if (!stored) return "`" + name + "` is missing in the checkpoint";
  if (stored->shape == shape) return {};
  const bool has_vocabulary = name.ends_with("word_embeddings.weight") || name == "output_layer.weight";
  return "`" + name + "`: " + stored->shape.text() + " in the checkpoint, " + shape.text() +
         " in the recipe" + (has_vocabulary ? ", whose first dimension is model.padded_vocab_size" : "");
}

// names: of all parameters of the model. Parameters that only the checkpoint has are named too: it is another
// model. A recipe without multi-token prediction leaves the layers for it out.
void refuse_differences(const TensorSource& source, const std::set<std::string>& names,
                        std::vector<std::string> problems) {
  constexpr std::string_view kMtp = "mtp.layers.";
  const auto first = names.lower_bound(std::string(kMtp));
  const bool predicts = first != names.end() && first->starts_with(kMtp);
  for (const auto& name : source.names())
    if (!name.starts_with("optimizer.") && !names.count(name) && (predicts || !name.starts_with(kMtp)))
      problems.push_back("`" + name + "` is in the checkpoint, but is not a parameter of the recipe's model");
  if (problems.empty()) return;
  fail(ErrorCode::failed,
       source.description() + " does not fit the recipe's model: " + std::to_string(problems.size()) +
           (problems.size() == 1 ? " difference\n    " : " differences\n    ") +
           join_some(problems, "\n    ", 8),
       model_help(source));
}

// The elements `range` of this rank's shard, from whichever ranks wrote them.
void read_range(TensorSource& source, const std::string& name, const Parameter& parameter,
                const FlatRange& range, DType type, std::span<std::byte> bytes) {
  const int64_t element = size_of(type);
  for (const ShardRegion& region : shard_regions(parameter.spec().shape, parameter.shard(), range))
    source.read(name, type, region.where,
                bytes.subspan(static_cast<size_t>((region.elements.begin - range.begin) * element),
                              static_cast<size_t>(region.elements.count * element)));
}

void read_into(TensorSource& source, const std::string& name,
               const parallel::FlatStore::ParameterShard& shard, const Tensor& target) {
  std::vector<std::byte> bytes;
  for (const FlatRange& range : chunks_of(shard.range)) {
    bytes.resize(static_cast<size_t>(range.count * size_of(target.dtype())));
    read_range(source, name, *shard.parameter, range, target.dtype(), bytes);
    target.flat_range(range.begin - shard.range.begin, range.count, {range.count})
        .copy_from_host_bytes(bytes);
  }
}

void read_scaling_states(TensorSource& source, const parallel::FlatStore& store) {
  std::vector<std::byte> bytes;
  for (const ScalingState& state : scaling_states(store)) {
    bytes.resize(static_cast<size_t>(state.values.bytes()));
    source.read(state.name, DType::f32, full_region(state.shape), bytes);
    state.values.copy_from_host_bytes(bytes);
  }
}

}  // namespace

static ParameterSet trained_part(const parallel::FlatStore& store) {
  return store.has_frozen_parameters() ? ParameterSet::adapters : ParameterSet::all;
}

static Json counters_in(const Reader& reader) {
  return json_of(reader.read_text(checkpoint::kStateFile), IfNotJson::discard);
}

void check_state(const Reader& reader, const parallel::FlatStore& store, const optim::Optimizer* optimizer) {
  const auto json = counters_in(reader);
  if (optimizer && json.is_object() && json.contains("optimizer") && json["optimizer"] == false)
    fail(ErrorCode::failed,
         "checkpoint `" + reader.directory().string() +
             "` was saved without optimizer state (checkpoint.save_optim)",
         "a new run continues from it with a fresh optimizer (checkpoint.load, checkpoint.load_optim=false), "
         "or starts from the weights alone (checkpoint.pretrained_checkpoint)");
  check_parameters(reader, store, trained_part(store), optimizer);
}

void check_parameters(const TensorSource& source, const parallel::FlatStore& store, ParameterSet which,
                      const optim::Optimizer* optimizer) {
  // A line for each name (`+`) and each problem (`-`).
  std::string here;
  const auto check = [&](const std::string& name, const Shape& shape) {
    if (const std::string text = difference(source, name, shape); !text.empty()) here += "-" + text + "\n";
  };
  for (const auto& parameter : store.parameters()) {
    if (!takes(which, *parameter)) continue;
    here += "+" + parameter->name() + "\n";
    check(parameter->name(), parameter->spec().shape);
    if (optimizer && store.is_trainable(*parameter))
      for (const auto& s : optimizer->state())
        if (s.has(store.buffer_of(*parameter)))
          check(state_name(s.name, *parameter), parameter->spec().shape);
  }
  if (optimizer)
    for (const ScalingState& state : scaling_states(store)) check(state.name, state.shape);
  std::set<std::string> names;
  std::vector<std::string> problems;
  comm::Communicator* const model = store.groups().dense.model;
  for (const auto& text : model ? comm::gather_texts(*model, here) : std::vector<std::string>{here})
    for (const auto& line : split(text, '\n')) {
      if (line.starts_with('+')) names.insert(std::string(line.substr(1)));
      if (line.starts_with('-') &&
          std::find(problems.begin(), problems.end(), line.substr(1)) == problems.end())
        problems.emplace_back(line.substr(1));
    }
  refuse_differences(source, names, std::move(problems));
}

static std::string text_of_state(const Reader& reader, const char* key) {
  const auto json = counters_in(reader);
  return json.is_object() && json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : "";
}
std::string stored_data_fingerprint(const Reader& reader) {
  return text_of_state(reader, "data");
}
std::string stored_base_hash(const Reader& reader) {
  return text_of_state(reader, "base");
}

std::optional<data::TokenizerRecord> tokenizer_of(const Reader& reader) {
  const std::string directory = reader.directory().string();
  if (reader.has_file("tokenizer.json") || reader.has_file("tokenizer.model"))
    return data::record_of(*text::Tokenizer::load(directory), directory);
  const auto json = counters_in(reader);
  if (!json.is_object() || !json.contains("tokenizer")) return std::nullopt;
  const auto& stored = json["tokenizer"];
  if (!stored.is_object() || !stored.contains("identity") || !stored["identity"].is_string() ||
      !stored.contains("name") || !stored["name"].is_string() || !stored.contains("vocab_size") ||
      !stored["vocab_size"].is_number_integer())
    fail(ErrorCode::format, "checkpoint `" + directory + "`: `tokenizer` of " +
                                std::string(checkpoint::kStateFile) + " is not a record of a tokenizer");
  return data::TokenizerRecord{stored["name"], stored["identity"], stored["vocab_size"].get<int64_t>()};
}

std::string schedule_text_of(const Reader& reader) {
  const auto json = counters_in(reader);
  return json.is_object() && json.contains("schedule") ? dump_json(json["schedule"]) : "";
}

static int64_t count_of(const Json& json, const std::string& file, const char* key) {
  if (!json.is_object() || !json.contains(key) || !json[key].is_number_integer() ||
      json[key].get<int64_t>() < 0)
    fail(ErrorCode::format, file + ": `" + key + "` is not a count");
  return json[key].get<int64_t>();
}

// The counters of a checkpoint; `file` is for messages.
static TrainState counters_of(const Json& json, const std::string& file) {
  // Absent where anomaly detection is off.
  const auto numbers = [&](const char* key) {
    std::vector<double> values;
    if (!json.contains(key)) return values;
    if (!json[key].is_array() || json[key].size() > 1'000'000)
      fail(ErrorCode::format, file + ": `" + key + "` is not a list of numbers");
    for (const auto& value : json[key]) {
      if (!value.is_number()) fail(ErrorCode::format, file + ": `" + key + "` is not a list of numbers");
      values.push_back(value.get<double>());
    }
    return values;
  };
  // Null: a value that is not finite.
  const auto means = [&](const char* key) -> StepMeans {
    if (!json.contains(key)) return {};
    std::vector<double> values;
    if (json[key].is_array())
      for (const auto& value : json[key])
        if (value.is_number() || value.is_null())
          values.push_back(value.is_null() ? std::nan("") : value.get<double>());
    if (values.size() == 4) values.push_back(values[0]);
    if (values.size() != 5 || !(values[0] >= 1 && values[0] <= 1e15) ||
        !(values[4] >= 0 && values[4] <= values[0]))
      fail(ErrorCode::format, file + ": `" + key + "` is not a list of four or five numbers");
    return {static_cast<int64_t>(values[0]), values[1], values[2], values[3],
            static_cast<int64_t>(values[4])};
  };
  const auto loss_scale = [&]() -> std::optional<optim::LossScale> {
    if (!json.contains("loss_scale")) return std::nullopt;
    const Json& stored = json["loss_scale"];
    const auto is_integer = [&](const char* key) {
      return stored.contains(key) && stored[key].is_number_integer();
    };
    if (!stored.is_object() || !stored.contains("scale") || !stored["scale"].is_number() ||
        !(stored["scale"].get<double>() > 0) || !is_integer("clean_steps") || !is_integer("overflows_left"))
      fail(ErrorCode::format, file + ": `loss_scale` is not the state of a loss scaler");
    return optim::LossScale{.scale = stored["scale"].get<double>(),
                            .clean_steps = stored["clean_steps"].get<int64_t>(),
                            .overflows_left = stored["overflows_left"].get<int64_t>()};
  };
  TrainState state;
  state.step = count_of(json, file, "step");
  state.consumed_samples = count_of(json, file, "consumed_samples");
  state.consumed_tokens = count_of(json, file, "consumed_tokens");
  state.schedule_samples = count_of(json, file, "schedule_samples");
  state.recent_losses = numbers("recent_losses");
  state.recent_norms = numbers("recent_norms");
  state.rewinds = json.contains("rewinds") ? count_of(json, file, "rewinds") : 0;
  state.loss_scale = loss_scale();
  state.since_log = means("since_log");
  state.since_events = means("since_events");
  return state;
}

TrainState load_state(Reader& reader, parallel::FlatStore& store, optim::Optimizer* optimizer) {
  check_state(reader, store, optimizer);
  const auto json = counters_in(reader);
  const std::string file = (reader.directory() / checkpoint::kStateFile).string();
  const ParameterSet which = trained_part(store);
  TrainState state = counters_of(json, file);
  store.before_load();
  for (const auto& shard : store.parameter_shards()) {
    if (!takes(which, *shard.parameter)) continue;
    read_into(reader, shard.parameter->name(), shard, shard.values());
    shard.set_changed();
    if (!optimizer || shard.buffer < 0) continue;
    for (const auto& s : optimizer->state()) {
      if (!s.has(shard.buffer)) continue;
      const Tensor values = optimizer->values(s, shard.buffer, shard.begin, shard.range.count);
      read_into(reader, state_name(s.name, *shard.parameter), shard, values);
      optimizer->set_values(s, shard.buffer, shard.begin, values);
    }
  }
  if (optimizer) read_scaling_states(reader, store);
  if (optimizer) optimizer->set_steps(count_of(json, file, "optimizer_steps"));
  store.after_load();
  return state;
}

void load_parameters(TensorSource& source, parallel::FlatStore& store, ParameterSet which) {
  check_parameters(source, store, which);
  store.before_load();
  for (const auto& shard : store.parameter_shards()) {
    if (!takes(which, *shard.parameter)) continue;
    read_into(source, shard.parameter->name(), shard, shard.values());
    shard.set_changed();
  }
  // Parameters stored in 4 bits are quantized as they are read, one at a time.
  std::vector<float> values;
  for (const auto& parameter : store.parameters()) {
    if (!store.quantized(*parameter) || !takes(which, *parameter)) continue;
    values.resize(static_cast<size_t>(parameter->shape().elements()));
    read_range(source, parameter->name(), *parameter, {0, parameter->shape().elements()}, DType::f32,
               std::as_writable_bytes(std::span(values)));
    store.set_quantized(*parameter, values);
  }
  store.after_load();
}

std::optional<checkpoint::Checkpoint> find_checkpoint(comm::World& world, const std::filesystem::path& root,
                                                      std::vector<std::string>& refused) {
  std::string found;
  int64_t step = 0;
  comm::run_collectively(world.communicator(), "looking for checkpoints", [&] {
    if (world.rank() != 0) return;
    const auto search = checkpoint::find_latest(root, checkpoint::Verification::content);
    for (const auto& bad : search.refused)
      refused.push_back(bad.checkpoint.path.filename().string() + ": " + bad.reason);
    if (search.found) found = search.found->path.string(), step = search.found->step;
  });
  found = comm::gather_texts(world.communicator(), found)[0];
  world.communicator().broadcast(&step, sizeof step, 0);
  if (found.empty()) return std::nullopt;
  return checkpoint::Checkpoint{found, step};
}

}  // namespace capstan::train

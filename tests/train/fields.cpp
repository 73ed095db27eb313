// No setting is ignored: every field of the schema has a proof in fields_table.cpp, and every proof is
// executed.
#include "fields.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "config/tools/show.hpp"
#include "data/indexed_writer.hpp"
#include "runs.hpp"
#include "support/errors.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"
#include "support/temporary_directory.hpp"
#include "text/chat/chat_template.hpp"
#include "train/adapters/adapters.hpp"
#include "train/setup/model.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/run_schedule.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using capstan::test::error_of;
using capstan::test::TemporaryDirectory;
using capstan::testing::Overrides;
using capstan::testing::Proof;
using capstan::testing::proofs;
using capstan::testing::View;
namespace fs = std::filesystem;

namespace {

const char* const kRecipe = R"(
name: tiny
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2,
        seq_length: 16, vocab_size: 64, make_vocab_size_divisible_by: 1, position_embedding_type: rope,
        normalization: RMSNorm, activation_func: silu, gated_linear_unit: true, add_bias_linear: false,
        hidden_dropout: 0.0, attention_dropout: 0.0}
train: {micro_batch_size: 2, global_batch_size: 4, train_iters: 6, threads: 1, device: cpu}
optimizer: {lr: 1e-2, min_lr: 1e-3, weight_decay: 0.1}
scheduler: {lr_decay_style: cosine}
dataset: {kind: mock}
validation: {eval_iters: 1}
logger: {log_interval: 1}
)";

// Files that recipes name: indexed data, fine-tuning data, tokenizers, a run and an adapter to begin with.
struct Bench {
  TemporaryDirectory root;
  Bench() {
    write("tiny.yaml", kRecipe);
    for (const auto& [name, step] : {std::pair("one", 3), {"two", 5}}) {
      data::IndexedWriter writer((root.path() / name).string(), data::TokenType::u16);
      for (int32_t d = 0; d < 60; ++d) {
        std::vector<int32_t> tokens;
        for (int32_t i = 0; i < 5 + d % 9; ++i) tokens.push_back((d * 7 + i * step) % 60);
        tokens.push_back(256);
        const std::vector<int32_t> lengths{static_cast<int32_t>(tokens.size())};
        writer.add_document(tokens, lengths);
      }
      writer.finish();
      std::string lines;
      for (int i = 0; i < 20; ++i) {
        const std::string question = std::string(i % 5 == 4 ? 90 : 4, static_cast<char>('a' + i % 7));
        lines += "{\"messages\": [{\"role\": \"user\", \"content\": \"" + question +
                 "?\"}, {\"role\": \"assistant\", \"content\": \"" + name + std::to_string(i) +
                 "\"}], \"text\": \"" + question + "\"}\n";
      }
      write(std::string(name) + ".jsonl", lines);
      write("damaged.jsonl", lines + "{}\n");
    }
    data::IndexedWriter small((root.path() / "small").string(),
                              data::TokenType::u16);  // for the tokenizers below
    for (int32_t d = 0; d < 60; ++d)
      small.add_document(std::vector<int32_t>{d % 9, 1, 2, 3, 4, 5, 6, 7, 9}, std::vector<int32_t>{9});
    small.finish();
    const std::string tail = R"(, "<|endoftext|>": 9})";
    const std::string words = R"({"a": 0, "b": 1, "1": 2, "2": 3, "ab": 4, "12": 5, "Ġ": 6, "'": 7, "s": 8)";
    write("vocab.json", words + tail);
    write("vocab2.json",
          R"({"a": 1, "b": 0, "1": 2, "2": 3, "ab": 4, "12": 5, "Ġ": 6, "'": 7, "s": 8)" + tail);
    write("merges.txt", "#version: 0.2\na b\n1 2\n");
    write("merges2.txt", "#version: 0.2\na b\n");
    for (const auto& [name, merges] :
         {std::pair("tokenizer.json", R"(["a b", "1 2"])"), {"other.json", R"(["a b"])"}})
      write(name, R"({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel",
                      "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
                      "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
                      "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "vocab": )" +
                      words + tail + R"(, "merges": )" + merges + "}}");
    files("begun", resolve({"checkpoint.save_interval=2"}));
    files("adapted", resolve({"peft.random_base=true", "peft.dim=4", "train.train_iters=2"}));
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(root.path() / name, std::ios::binary) << text;
  }
  config::Resolution resolve(const Overrides& overrides) const {
    return capstan::testing::resolve_recipe(root.path() / "tiny.yaml", overrides);
  }
  std::string files(const std::string& run, const config::Resolution& resolution,
                    Resume resume = Resume::no) const;
};
const Bench& bench() {
  static const Bench once;
  return once;
}

struct Notes final : ProgressSink {
  void line(const std::string& text) override { note(text); }
  void warning(const std::string& text) override { note("warning: " + text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }
  // Lines without their times and rates.
  void note(const std::string& text) {
    handled = handled || handler() != before;
    if (text.starts_with("step "))
      all += text.substr(0, std::min({text.find(" tok/s"), text.find(" | lr"), text.find(" | saved"),
                                      text.find(" | perplexity")})) +
             "\n";
    if (text.starts_with("warning") || text.starts_with("resumed") || text.starts_with("weights from"))
      all += text + "\n";
  }
  using Handler = void (*)(int);
  static Handler handler() {
    struct sigaction action {};
    ::sigaction(SIGTERM, nullptr, &action);
    return action.sa_handler;
  }
  std::string all;
  // doctest's handler.
  Handler before = handler();
  bool handled = false;
};

template <class... Values>
void add(std::string& text, const Values&... values) {
  std::ostringstream out;
  out.precision(17);
  ((out << values << " "), ...);
  text += out.str() + "\n";
}

std::string Bench::files(const std::string& run, const config::Resolution& resolution, Resume resume) const {
  const fs::path directory = root.path() / run;
  const RunOptions options = capstan::testing::run_options(resolution, directory, resume);
  Notes notes;
  std::string text;
  const auto world = comm::World::single_process();
  try {
    const Outcome outcome = train::train(resolution.config, *world, options, notes);
    add(text, outcome.step, outcome.ended == Ended::finished, outcome.reason, outcome.checkpoint.filename());
  } catch (const Error& error) {
    add(text, error.what());
  }
  add(text, "SIGTERM handled:", notes.handled);
  std::set<std::string> there;
  for (const fs::path& place :
       {directory, root.path() / "saves", root.path() / "events", root.path() / "traces"}) {
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(place, none)) {
      std::string name = entry.path().lexically_relative(root.path()).string();
      const bool events = name.find("events.out") != std::string::npos;
      if (events) name = name.substr(0, name.find("events.out"));
      const bool sized = events || name.ends_with(".safetensors");
      const std::string place_name = place == directory ? "run" : place.filename().string();
      there.insert(place_name + name.substr(name.find('/')) +
                   (sized ? " " + std::to_string(entry.file_size()) : ""));
    }
  }
  for (const std::string& name : there) add(text, name);
  if (fs::exists(directory / "trace/rank-0.json")) {
    std::ifstream file(directory / "trace/rank-0.json");
    const std::string trace{std::istreambuf_iterator<char>(file), {}};
    for (int step = 0; step < 8; ++step)
      add(text, step, trace.find("\"step\":" + std::to_string(step)) != std::string::npos,
          trace.find("\"step\": " + std::to_string(step)) != std::string::npos);
    add(text, trace.find("shape") != std::string::npos);
  }
  if (fs::exists(directory / "metrics.jsonl"))
    records::read_metrics(directory / "metrics.jsonl", [&](const records::ReadRow& row) {
      add(text, row.step.value_or(-1), row.event, row.number("loss"), row.number("grad_norm"),
          row.number("learning_rate"), row.number("params_norm"), row.number("num_zeros"));
    });
  text += notes.all + options.recipe.name;
  for (size_t at; (at = text.find(directory.string())) != std::string::npos;)
    text.replace(at, directory.string().size(), "RUN");
  return text;
}

std::string run_view(const config::Config& config) {
  std::string text;
  const auto world = comm::World::single_process();
  try {
    StepRunner runner(config, *world);
    add(text, runner.device().name(), runner.device().host_threads().size());
    runner.initialize();
    if (config.peft) begin_adapters(config, runner.device(), runner.store(), BaseWeights{});
    const auto data = open_datasets(config, nullptr);
    data::Loader loader(data[0], runner.loader_options());
    StepTimers timers;
    for (int64_t step = 0; step < std::max<int64_t>(5, *config.train.train_iters - 1); ++step) {
      const StepResult result = runner.train_step(loader, timers);
      add(text, result.loss, result.gradient_norm, result.learning_rate, result.skipped, result.rewind);
      for (const Anomaly& anomaly : result.anomalies) add(text, anomaly.event, anomaly.text);
      if (result.rewind) break;
    }
    add(text, runner.evaluate(data[1] ? data[1] : data[0], 1));
    add(text, runner.device().graph_counts().graphs);
  } catch (const Error& error) {
    add(text, error.what());
  }
  return text;
}

std::string model_view(const config::Config& config) {
  std::string text;
  const auto model = models::build(config.model);
  for (const auto& parameter : model->parameters())
    add(text, parameter->name(), parameter->shape().text(), static_cast<int>(parameter->spec().init.kind),
        parameter->spec().init.std);
  return text;
}

std::string wiring_view(const config::Config& config) {
  std::string text;
  const comm::MeshSizes sizes = mesh_sizes(config, config.dist.world_size);
  for (int64_t rank = 0; rank < config.dist.world_size; ++rank) {
    comm::Mesh mesh(sizes, rank);
    mesh.connect_meta();
    for (const std::string& name : mesh.group_names()) {
      add(text, rank, name);
      for (const int64_t member : mesh.members(name, rank)) add(text, member);
    }
    for (const models::Stage& stage : model_shard(config, mesh).stages)
      add(text, stage.first_layer, stage.layers, stage.embedding, stage.head);
    const auto shape = pipeline_shape(config, micro_batches_of(config, mesh));
    add(text, shape.ranks, shape.chunks, shape.micro_batches, shape.group, static_cast<int>(shape.order));
    add(text, tensor_parallel(config, mesh).splits);
  }
  const auto store = store_options(config);
  add(text, static_cast<int>(store.sharding), store.overlap_grad_reduce, store.overlap_param_gather,
      store.bucket_elements.value_or(0), store.shard_over_replicas,
      config.comm_overlap.overlap_p2p_comm.value_or(true));
  return text;
}

std::string memory_view(const config::Config& config) {
  std::string text;
  for (const int64_t rank : {int64_t{0}, config.dist.world_size - 1}) {
    const StepEstimate step = estimate_step(config, rank, 1);
    add(text, step.flops, step.memory.peak);
    for (const int64_t bytes : step.memory.peak_by_category) add(text, bytes);
    for (const int64_t bytes : step.host_memory.peak_by_category) add(text, bytes);
    add(text, step.state_file);
    for (const auto& [group, bytes] : step.sent) add(text, group, bytes);
  }
  return text;
}

std::string data_view(const config::Config& config) {
  std::string text;
  const auto tokenizer = load_tokenizer(config);
  for (const auto& data : open_datasets(config, tokenizer.get())) {
    if (!data) {
      add(text, "none");
      continue;
    }
    add(text, data->samples() > 1'000'000 ? -1 : data->samples(), data->epoch_samples() > 1'000'000,
        data->fingerprint(), data->summary());
    const auto length = static_cast<size_t>(data->sequence_length());
    std::vector<int32_t> tokens(length), labels(length), positions(length), bounds;
    std::vector<float> mask(length);
    for (int64_t row = 0; row < 3; ++row) {
      bounds.clear();
      data->row(row, {tokens, labels, mask, positions, &bounds});
      for (size_t i = 0; i < length; ++i) add(text, tokens[i], mask[i], positions[i]);
      for (const int32_t bound : bounds) add(text, bound);
    }
  }
  const auto world = comm::World::single_process();
  add(text, StepRunner(config, *world).loader_options().num_workers);
  return text;
}

std::string tokens_view(const config::Config& config) {
  std::string text;
  const auto tokenizer = load_tokenizer(config);
  if (!tokenizer) return "none";
  for (const int32_t id : tokenizer->encode("ab ba 1212's")) add(text, id);
  add(text, end_of_document(config, *tokenizer).value_or(-1));
  if (config.tokenizer.chat_template)
    if (const auto chat = chat_template_of(config, *tokenizer)) add(text, chat->text());
  return text;
}

std::string resume_view(const config::Resolution& resolution) {
  static int runs = 0;
  const std::string name = "resumed" + std::to_string(runs++);
  bench().files(name, bench().resolve({"train.exit_interval=4"}));
  return bench().files(name, resolution, Resume::existing);
}

std::string view_of(View view, const config::Resolution& resolution) {
  static int runs = 0;
  const config::Config& config = resolution.config;
  switch (view) {
    case View::run:
      return run_view(config);
    case View::model:
      return model_view(config);
    case View::wiring:
      return wiring_view(config);
    case View::memory:
      return memory_view(config);
    case View::data:
      return data_view(config);
    case View::tokens:
      return tokens_view(config);
    case View::files:
      for (const char* shared : {"saves", "events", "traces"}) fs::remove_all(bench().root.path() / shared);
      return bench().files("run" + std::to_string(runs++), resolution);
    case View::resume:
      return resume_view(resolution);
    case View::shown:
      return config::resolved_recipe(resolution);
  }
  return {};
}

std::string errors_of(const config::Resolution& resolution) {
  std::string text;
  for (const auto& diagnostic : resolution.diagnostics)
    if (diagnostic.level == config::Level::error) text += diagnostic.code + " " + diagnostic.message + "\n";
  return text;
}

bool has(const config::Resolution& resolution, config::Level level, const std::string& code_or_name,
         const std::string& field = {}) {
  return std::any_of(resolution.diagnostics.begin(), resolution.diagnostics.end(), [&](const auto& one) {
    return one.level == level && (one.code == code_or_name || one.name == code_or_name) &&
           (field.empty() || one.path == field);
  });
}

std::set<std::string> missing(const config::Resolution& resolution) {
  std::set<std::string> paths;
  for (const auto& feature : config::missing_features(config::schema(), &resolution.config))
    paths.insert(feature.path);
  return paths;
}

Overrides with(Overrides base, const Overrides& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

// Ends this proof, not the test.
void require_ok(const config::Resolution& resolution) {
  if (!resolution.ok()) throw std::runtime_error(errors_of(resolution));
}

void carry_out(const Proof& proof) {
  const std::string set = proof.field + "=" + proof.value;
  Overrides changed = with(proof.base, {set});
  if (proof.kind == Proof::Kind::changes) changed = with(changed, proof.when);
  const config::Resolution before = bench().resolve(proof.base), after = bench().resolve(changed);
  if (proof.kind != Proof::Kind::allows && proof.kind != Proof::Kind::elsewhere) require_ok(before);
  const bool idle = has(after, config::Level::error, "C0604", proof.field) ||
                    has(after, config::Level::warning, "C0606", proof.field);
  if (proof.kind != Proof::Kind::idle) CHECK_MESSAGE(!idle, "has no effect in its own proof");
  switch (proof.kind) {
    case Proof::Kind::changes:
      require_ok(after);
      CHECK(missing(before).empty());
      CHECK(missing(after).empty());
      if (proof.view == View::shown) CHECK(proof.field == "description");
      // A result that differs between two runs of the same recipe would prove nothing.
      if (proof.view == View::files || proof.view == View::resume)
        CHECK(view_of(proof.view, before) == view_of(proof.view, before));
      CHECK(view_of(proof.view, before) != view_of(proof.view, after));
      return;
    case Proof::Kind::refused:
      require_ok(after);
      CHECK(missing(before).count(proof.field) == 0);
      CHECK(missing(after).count(proof.field) == 1);
      return;
    case Proof::Kind::idle: {
      CHECK(idle);
      const config::Resolution read = bench().resolve(with(with(proof.base, proof.when), {set}));
      CHECK(!has(read, config::Level::error, "C0604", proof.field));
      CHECK(!has(read, config::Level::warning, "C0606", proof.field));
      const auto refused = missing(read);
      CHECK(std::any_of(proof.when.begin(), proof.when.end(), [&](const std::string& text) {
        const auto* field = config::schema().find_spelling(text.substr(0, text.find('=')));
        return field && refused.count(field->path) == 1;
      }));
      return;
    }
    case Proof::Kind::ruled:
      CHECK_MESSAGE(has(after, config::Level::error, proof.rule), errors_of(after));
      return;
    case Proof::Kind::warned:
      require_ok(after);
      CHECK(has(after, config::Level::warning, proof.rule));
      CHECK(!has(before, config::Level::warning, proof.rule));
      return;
    case Proof::Kind::allows:
      CHECK_MESSAGE(has(before, config::Level::error, proof.rule), errors_of(before));
      CHECK_MESSAGE(after.ok(), errors_of(after));
      return;
    case Proof::Kind::elsewhere: {
      CHECK(proof.field == "resilience.timeout");  // the world is joined by the program, not by the trainer
      std::ifstream file(fs::path(test::kSourceDirectory) / proof.rule);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      CHECK(text.find("TEST_CASE(\"" + proof.value) != std::string::npos);  // two runs that differ
      return;
    }
  }
}

}  // namespace

TEST_CASE("every field has one proof, and every proof a field") {
  std::map<std::string, int> counted;
  for (const Proof& proof : proofs()) ++counted[proof.field];
  for (const config::FieldInfo* field : config::schema().fields()) {
    CHECK_MESSAGE(counted[field->path] == 1, field->path << " has " << counted[field->path] << " proofs");
    counted.erase(field->path);
  }
  for (const auto& [field, count] : counted) CHECK_MESSAGE(count == 0, field << " is no field");
}

// The proof of the field shows one value.
TEST_CASE("each module of selective recomputation saves activations") {
  const Overrides experts = {"model.num_moe_experts=4", "model.moe_shared_expert_intermediate_size=24"},
                  latent = {"model.multi_latent_attention=true", "model.position_embedding_type=rope",
                            "model.num_query_groups=4"};
  const std::map<std::string, Overrides> models = {{"layernorm", {}},
                                                   {"mlp", {}},
                                                   {"moe", experts},
                                                   {"moe_act", experts},
                                                   {"shared_experts", experts},
                                                   {"mla_up_proj", latent}};
  const auto activations = [](Overrides overrides, const std::string& modules) {
    if (!modules.empty())
      overrides.insert(overrides.end(), {"model.recompute_granularity=selective",
                                         "model.recompute_modules=[" + modules + "]"});
    const config::Resolution resolution = bench().resolve(overrides);
    require_ok(resolution);
    return estimate_step(resolution.config)
        .memory.peak_by_category[static_cast<size_t>(MemoryCategory::activations)];
  };
  for (const auto& entry : config::EnumNames<config::RecomputeModule>::list) {
    const std::string module = entry.name;
    CAPTURE(module);
    if (module == "core_attn") {
      CHECK(activations({}, module) == activations({}, ""));
      continue;
    }
    CHECK(activations(models.at(module), module) < activations(models.at(module), ""));
  }
}

TEST_CASE("a token that ends documents and that the tokenizer lacks is an error") {
  fs::current_path(bench().root.path());
  const auto resolution = bench().resolve(
      {"tokenizer.tokenizer_type=gpt2_bpe", "tokenizer.vocab_file=vocab.json",
       "tokenizer.merge_file=merges.txt", "model.vocab_size=300", "tokenizer.eod_token=nosuch"});
  require_ok(resolution);
  std::string refused;
  try {
    require_eod_token(resolution.config, *load_tokenizer(resolution.config));
  } catch (const Error& error) {
    refused = error.what();
  }
  CHECK(refused.find("the tokenizer has no token `nosuch` (tokenizer.eod_token)") != std::string::npos);
}

TEST_CASE("no setting is ignored") {
  fs::current_path(bench().root.path());
  for (const Proof& proof : proofs()) {
    CAPTURE(proof.field);
    CAPTURE(proof.value);
    try {
      carry_out(proof);
    } catch (const std::exception& error) {
      FAIL_CHECK(std::string(error.what()));
    }
  }
}

// Results that are equal although the value is read.
static bool silent_by_nature(const std::string& setting, const std::string& field) {
  // The biases of a base that is initialized from the seed are zero, and frozen.
  if (setting.starts_with("adapters") && field.starts_with("model.add_")) return true;
  // The signs of Lion's update do not depend on a factor that all steps have.
  if (setting == "Lion" && field == "optimizer.clip_grad") return true;
  // Exports record it (initializer_range), whatever the weights began with.
  if (setting == "pretrained weights" && field == "model.init_method_std") return true;
  // These few steps have no spike or overflow.
  return (setting.starts_with("adapters with ") && field.starts_with("resilience.loss_spike")) ||
         (setting == "fp16" && field == "mixed_precision.hysteresis");
}

// The same values beside other choices: adapters, other optimizers, another precision. A value may then have
// nothing to do, but not in silence.
TEST_CASE("no setting is ignored beside other choices") {
  fs::current_path(bench().root.path());
  const std::map<std::string, Overrides> settings = {
      {"adapters", {"peft.random_base=true", "peft.dim=4"}},
      {"Muon", {"optimizer.optimizer=muon"}},
      {"adapters with magnitudes", {"peft.random_base=true", "peft.dim=4", "peft.scheme=dora"}},
      {"Lion", {"optimizer.optimizer=lion"}},
      {"SGD", {"optimizer.optimizer=sgd"}},
      {"pretrained weights", {"checkpoint.pretrained_checkpoint=begun"}},
      {"adapters with Muon", {"peft.random_base=true", "peft.dim=4", "optimizer.optimizer=muon"}},
      {"a constant schedule", {"scheduler.lr_decay_style=constant", "optimizer.min_lr=0"}},
      {"recomputation",
       {"model.recompute_granularity=full", "model.recompute_method=uniform",
        "model.recompute_num_layers=1"}},
      {"bf16", {"mixed_precision=bf16_mixed"}},
      {"fp16", {"mixed_precision=fp16_mixed", "mixed_precision.initial_loss_scale=4096"}},
      {"fp16 with a static loss scale", {"mixed_precision=fp16_mixed", "mixed_precision.loss_scale=64"}},
      {"linear scaling of RoPE",
       {"model.rope_scaling=true", "model.rope_scaling_type=linear", "model.rope_scaling_factor=2"}}};
  for (const auto& [name, setting] : settings) {
    // The code that runs is nearly the same for each.
    if (test::kSanitized && name != "adapters with Muon") continue;
    CAPTURE(name);
    int compared = 0;
    for (const Proof& proof : proofs()) {
      if (proof.kind != Proof::Kind::changes || proof.view != View::run) continue;
      const Overrides base = with(proof.base, setting);
      const config::Resolution before = bench().resolve(base),
                               after = bench().resolve(
                                   with(with(base, {proof.field + "=" + proof.value}), proof.when));
      if (!before.ok() || !after.ok() || !missing(before).empty() || !missing(after).empty()) continue;
      const bool said = std::ranges::any_of(after.diagnostics, [&](const config::Diagnostic& one) {
        return one.path == proof.field || one.message.find(proof.field) != std::string::npos;
      });
      const config::FieldInfo& field = *config::schema().find_spelling(proof.field);
      const bool same =
          config::schema().load(&before.config, field) == config::schema().load(&after.config, field);
      if (said || same || silent_by_nature(name, proof.field)) continue;
      CAPTURE(proof.field);
      CAPTURE(proof.value);
      ++compared;
      try {
        CHECK(view_of(proof.view, before) != view_of(proof.view, after));
      } catch (const std::exception& error) {
        FAIL_CHECK(std::string(error.what()));
      }
    }
    CHECK(compared > 40);
  }
}

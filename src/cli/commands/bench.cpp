// capstan bench
#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/calibration.hpp"
#include "cli/commands/commands.hpp"
#include "cli/launch.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "comm/reduce.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/step_measurement.hpp"

namespace capstan::cli {

namespace {

OrderedJson memory_json(const MemoryUse& use) {
  OrderedJson object;
  for (size_t category = 0; category < kMemoryCategories; ++category)
    object[std::string(name_of(static_cast<MemoryCategory>(category)))] = use.peak_by_category[category];
  object["peak"] = use.peak;
  object["cached"] = use.cached();
  return object;
}

// The parts of the program, each with its rows in the JSON object and its text.
class Bench {
 public:
  Bench(Context& context, const config::Resolution& resolution, comm::World& world);
  void measure_machine();
  // Errors: usage, where a kernel's name is unknown, and for kernels on several ranks.
  void check_names() const;
  void measure_kernels();
  void measure_training_step();
  bool wanted(std::string_view name) const;
  // Prints what has been added to the JSON object since the last call, so that a process that is ended leaves
  // the rows that it has measured; at the end also what closes the object.
  void print_json(bool complete = false);
  // Errors: failed, where a kernel could not be measured.
  void check_kernels() const;

 private:
  // GEMMs and attention: on the host in fp32, of which oneDNN's are the peak; elsewhere in the step's type.
  DType kernel_type() const { return on_host_ ? DType::f32 : type_; }
  double kernel_gemm() const { return on_host_ ? gemm_ : step_gemm_; }
  void add_gemm(const kernels::NamedGemm& shape, Table& table);
  void add_kernel(const kernels::KernelRate& kernel, Table& table, double onednn_rate = 0);
  std::string phases_text(const train::StepMeasurement& step);
  std::string operations_text(const train::StepMeasurement& step);
  std::string step_title(const train::StepMeasurement& step) const;
  // Prints nothing with --json, which prints one object, and nothing on other ranks.
  void print(const std::string& text) const {
    if (!args_.has("json") && world_.rank() == 0) put(text);
    flush_output();
  }

  const Arguments& args_;
  const config::Resolution& resolution_;
  comm::World& world_;
  // Duration of the measurement of a kernel.
  double seconds_;
  Progress progress_;
  std::unique_ptr<Device> device_;
  // Whether threads of this host run the kernels.
  const bool on_host_;
  // The compute type of the step.
  const DType type_;
  // GFLOP/s in fp32, and in that type: of a rank, the mean of all, which measure at the same time.
  double gemm_ = 0, step_gemm_ = 0;
  double copy_ = 0;  // GB/s
  OrderedJson json_ = {{"schema", "capstan.bench/1"}};
  // Bytes of the object's text.
  size_t printed_ = 0;
  // Names.
  std::vector<std::string> failed_;
};

Bench::Bench(Context& context, const config::Resolution& resolution, comm::World& world)
    : args_(context.args),
      resolution_(resolution),
      world_(world),
      seconds_(args_.number("seconds", 0.01, 60).value_or(0.2)),
      progress_(!context.quiet() && !args_.has("json") && world.rank() == 0, context.color_err),
      device_(train::make_device(resolution.config, train::local_rank_of(world))),
      on_host_(train::backend_of(resolution.config.train.device).runs_on_host_threads),
      type_(train::backend_of(resolution.config.train.device)
                .gemm_type(train::compute_type(resolution.config.mixed_precision))) {}

bool Bench::wanted(std::string_view name) const {
  const auto& names = args_.words();
  return names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& given) {
           return name.find(given) != std::string_view::npos;
         });
}

void Bench::measure_machine() {
  const auto features = kernels::cpu_features();
  json_["machine"] = {{"cores", available_cores()},
                      {"threads", device_->host_threads().size()},
                      {"ranks", world_.size()},
                      {"instruction_set", features.instruction_set},
                      {"native_bf16", features.native_bf16_gemm}};
  json_["device"] = device_->description();
  print("machine: " + std::to_string(available_cores()) + " cores, " + std::string(features.instruction_set) +
        (features.native_bf16_gemm ? ", native bf16 GEMM" : ", bf16 GEMM computed in fp32") + "\n");
  if (!on_host_) print("device:  " + device_->description() + "\n");
  const auto mean = [&](double value) {
    return comm::all_reduce(world_.communicator(), value) / world_.size();
  };
  gemm_ = mean(kernels::peak_gemm_gflops(*device_));
  step_gemm_ = type_ == DType::f32 ? gemm_ : mean(kernels::peak_gemm_gflops(*device_, type_));
  copy_ = mean(kernels::measured_copy_gbps(*device_));
  json_["gemm_gflops"] = gemm_;
  json_["step_gemm_gflops"] = step_gemm_;
  json_["copy_gbps"] = copy_;
  json_["kernels"] = OrderedJson::array();
  const bool tf32 = type_ == DType::f32 && resolution_.config.mixed_precision.tf32;
  const char* how = on_host_ ? "peak: the best of this program and oneDNN" : tf32 ? "TF32" : "without TF32";
  print("gemm:    " + fixed(gemm_, 1) + " GFLOP/s fp32 (" + how + ")" +
        (type_ == DType::f32 ? "" : ", " + fixed(step_gemm_, 1) + " GFLOP/s " + std::string(name_of(type_))) +
        "\ncopy:    " + fixed(copy_, 1) + " GB/s read and written\n");
}

void Bench::check_names() const {
  const std::vector<std::string>& names = args_.words();
  if (world_.size() > 1 && (names.size() != 1 || names[0] != "step"))
    fail(ErrorCode::usage, "kernels are measured in one process", "of several ranks: capstan bench step");
  std::vector<std::string> known = kernels::kernel_names();
  known.emplace_back("step");
  for (const std::string& given : names) {
    if (std::any_of(known.begin(), known.end(),
                    [&](const std::string& name) { return name.find(given) != std::string::npos; }))
      continue;
    const std::string near = did_you_mean(given, known);
    fail(ErrorCode::usage, "no kernel has `" + given + "` in its name",
         near.empty() ? "the names:\n    " + join(known, "\n    ") : near);
  }
}

void Bench::print_json(bool complete) {
  if (!args_.has("json") || world_.rank() != 0) return;
  std::string text = dump_json(json_, 2) + "\n";
  // The text of an object that has fewer members begins that of one with more, but for what closes it.
  if (!complete) text.resize(text.find_last_not_of(" \n]}") + 1);
  put(std::string_view(text).substr(printed_));
  flush_output();
  printed_ = text.size();
}

void Bench::check_kernels() const {
  if (failed_.empty()) return;
  fail(ErrorCode::failed,
       counted(std::ssize(failed_), "kernel") + " could not be measured: " + join(failed_, ", "));
}

void Bench::add_gemm(const kernels::NamedGemm& shape, Table& table) {
  kernels::KernelRate kernel{shape.name, kernels::Peak::gemm};
  double onednn_rate = 0;
  try {
    kernel.rate = kernels::gemm_gflops(*device_, shape, kernel_type(), seconds_);
    kernel.fraction_of_peak = kernel.rate / kernel_gemm();
    if (on_host_) onednn_rate = kernels::onednn_gemm_gflops(shape, device_->host_threads().size(), seconds_);
  } catch (const std::exception& error) {
    kernel.error = error.what();
  }
  add_kernel(kernel, table, onednn_rate);
}

void Bench::add_kernel(const kernels::KernelRate& kernel, Table& table, double onednn_rate) {
  OrderedJson& rows = json_["kernels"];
  if (!kernel.error.empty()) {
    failed_.push_back(kernel.name);
    rows.push_back({{"name", kernel.name}, {"error", kernel.error}});
    table.add({kernel.name, "failed: " + kernel.error.substr(0, kernel.error.find('\n'))});
    return print_json();
  }
  const std::string unit = kernel.peak == kernels::Peak::gemm ? "GFLOP/s" : "GB/s";
  OrderedJson row = {{"name", kernel.name},
                     {"rate", kernel.rate},
                     {"unit", unit},
                     {"fraction_of_peak", kernel.fraction_of_peak}};
  std::vector<std::string> cells = {kernel.name, fixed(kernel.rate, 1) + " " + unit,
                                    fixed(100 * kernel.fraction_of_peak, 0) + "%"};
  if (onednn_rate > 0) {
    row["onednn_rate"] = onednn_rate;
    cells.push_back("oneDNN " + fixed(onednn_rate, 1));
  }
  rows.push_back(std::move(row));
  table.add(std::move(cells));
  print_json();
}

void Bench::measure_kernels() {
  progress_.status("measuring kernels");
  Table table;
  kernels::KernelBenchOptions options{
      .attention = kernel_type(),
      .gemm_gflops = kernel_gemm(),
      .copy_gbps = copy_,
      .seconds = seconds_,
      .wanted = [&](std::string_view name) { return wanted(name); },
      .report = [&](const kernels::KernelRate& kernel) { add_kernel(kernel, table); }};
  // On a CPU the large model takes minutes: it is measured only if it is named.
  const bool accelerator = kernels::is_accelerator(kernel_gemm());
  options.large_model = accelerator || std::ranges::any_of(args_.words(), [](const std::string& word) {
                          return word.find(kernels::kLargeModel) != std::string::npos;
                        });
  if (accelerator) options.activations = kernel_type();
  for (const kernels::NamedGemm& shape : kernels::named_gemms(options.large_model))
    if (wanted(shape.name)) add_gemm(shape, table);
  kernels::measure_kernels(*device_, options);
  if (const auto next_note = device_->table().next_note)
    while (const char* const note = next_note()) print_stderr(std::string("note: ") + note + "\n");
  print("\nkernels" +
        (on_host_      ? ""
         : accelerator ? " in " + std::string(name_of(type_))
                       : ", GEMMs and attention in " + std::string(name_of(type_))) +
        ", as % of the peak GEMM throughput or of the copy bandwidth:\n" + table.text());
}

std::string Bench::phases_text(const train::StepMeasurement& step) {
  Table table;
  OrderedJson& phases = json_["step"]["phases"];
  for (size_t p = 0; p < train::kPhases; ++p) {
    const std::string name(train::name_of(static_cast<train::Phase>(p)));
    phases[name] = step.phases[p];
    if (step.phases[p] > 0)
      table.add({"  " + name, fixed(1e3 * step.phases[p], 1) + " ms",
                 fixed(100 * step.phases[p] / step.seconds, 0) + "%"});
  }
  return table.text();
}

std::string Bench::operations_text(const train::StepMeasurement& step) {
  Table table;
  OrderedJson& operations = json_["step"]["operations"] = OrderedJson::array();
  const double peak = step.concurrent_gflops > 0 ? step.concurrent_gflops : step_gemm_;
  for (const auto& row : step.operations) {
    const double rate = row.seconds > 0 ? row.cost.flops / row.seconds * 1e-9 : 0;
    const double bandwidth = row.seconds > 0 ? row.cost.bytes / row.seconds * 1e-9 : 0;
    operations.push_back({{"name", row.name},
                          {"phase", std::string(1, row.phase)},
                          {"calls", row.calls},
                          {"seconds", row.seconds},
                          {"fraction_of_step", row.seconds / step.seconds},
                          {"gflops", rate},
                          {"gbps", bandwidth}});
    if (row.seconds <= 0.002 * step.seconds) continue;
    table.add({"  " + row.name + " " + row.phase, std::to_string(row.calls) + "x",
               fixed(1e3 * row.seconds, 1) + " ms", fixed(100 * row.seconds / step.seconds, 1) + "%",
               rate > 0 ? fixed(rate, 0) + " GFLOP/s, " + fixed(100 * rate / peak, 0) + "% of GEMM"
                        : fixed(bandwidth, 1) + " GB/s, " + fixed(100 * bandwidth / copy_, 0) + "% of copy"});
  }
  return table.text();
}

std::string Bench::step_title(const train::StepMeasurement& step) const {
  const std::string ranks = world_.size() > 1 ? " on " + counted(world_.size(), "rank") : "";
  return "\ntraining step of " + resolution_.recipe_name + ranks + ": " +
         human_count(step.tokens_per_second) + " tokens/s, " + fixed(100 * step.fraction_of_peak, 1) +
         "% of peak GEMM throughput" +
         (step.fraction_of_concurrent > 0
              ? ", " + fixed(100 * step.fraction_of_concurrent, 1) + "% of the " +
                    fixed(step.concurrent_gflops, 1) + " GFLOP/s of a GEMM run between its operations"
              : "") +
         " (" + counted(step.micro_batches, "micro-batch") + " a step)\n" +
         (ranks.empty() ? "" : "phases, operations and memory of rank 0:\n");
}

std::string graphs_text(const train::GraphMeasurement& graphs) {
  return "CUDA graphs: " + fixed(1e3 * graphs.with, 2) + " ms a step, " + fixed(1e3 * graphs.without, 2) +
         " ms without (" + fixed(graphs.without / graphs.with, 2) + " times as fast), with " +
         counted(graphs.graphs, "graph") + " (" + std::to_string(graphs.instantiated) + " instantiated) of " +
         std::to_string(graphs.nodes) +
         " kernels, fills and copies; the numbers below are of steps without\n";
}

void Bench::measure_training_step() {
  progress_.status("measuring a training step");
  const train::StepMeasurement step =
      train::measure_step(train::with_short_step(resolution_.config, step_gemm_), world_, step_gemm_,
                          std::max(2.0, 10 * seconds_));
  json_["step"] = {
      {"recipe", resolution_.recipe_name},           {"tokens_per_second", step.tokens_per_second},
      {"fraction_of_peak", step.fraction_of_peak},   {"fraction_of_concurrent", step.fraction_of_concurrent},
      {"concurrent_gflops", step.concurrent_gflops}, {"seconds", step.seconds},
      {"micro_batches", step.micro_batches}};
  const std::string phases = phases_text(step), operations = operations_text(step);
  json_["step"]["memory"] = memory_json(step.memory);
  json_["step"]["memory_estimated"] = memory_json(step.estimated);
  json_["step"]["steps"] = step.steps;
  if (step.bubble)
    json_["step"]["pipeline_bubble"] = {{"measured", step.bubble->measured},
                                        {"simulated", step.bubble->simulated}};
  if (step.graphs)
    json_["step"]["cuda_graphs"] = {{"seconds", step.graphs->with},
                                    {"seconds_without", step.graphs->without},
                                    {"graphs", step.graphs->graphs},
                                    {"nodes", step.graphs->nodes},
                                    {"instantiated", step.graphs->instantiated}};
  print(step_title(step) + (step.graphs ? graphs_text(*step.graphs) : "") + phases +
        (step.bubble ? train::bubble_text(*step.bubble) + "\n" : "") +
        "by operation (F forward, B backward, W weight gradients):\n" + operations + "peak memory: " +
        train::memory_text(step.memory) + "\nestimated:   " + train::memory_text(step.estimated) + "\n");
}

// Writes a cluster file for `plan`. The ranks of a launch measure together.
int calibrate(Context& context, const std::string& file, const std::string& recipe) {
  if (!context.args.words().empty() || context.args.has("json"))
    fail(ErrorCode::usage, "--calibrate measures all that a cluster file has, and excludes NAME and --json");
  refuse_other_content(file, "# measured by `capstan bench");
  if (const auto directory = std::filesystem::absolute(file).parent_path();
      !std::filesystem::exists(directory))
    fail(ErrorCode::io, "cannot create " + file + ": there is no directory " + directory.string());
  const config::Resolution resolution =
      recipe_for_measuring(context, recipe, comm::launched_as().size, comm::launched_as().rank == 0);
  const double seconds = context.args.number("seconds", 0.01, 60).value_or(0.1);
  return run_in_world(context, resolution.config.resilience.timeout.seconds, [&](comm::World& world) {
    const std::string text = measured_cluster(resolution.config, world, seconds);
    if (world.rank() != 0) return 0;
    write_file_durably(file, text);
    put(file + "\n");
    return 0;
  });
}

int run_bench(Context& context) {
  const auto recipe = context.args.value("recipe");
  if (!recipe && !context.args.overrides().empty())
    fail(ErrorCode::usage,
         "the override `" + context.args.overrides().front().text + "` changes a recipe, and none is given",
         "name one with -r RECIPE");
  const int64_t nproc = context.args.integer("nproc", 1, 4096).value_or(1);
  if (const auto file = context.args.value("calibrate"))
    return nproc > 1 ? launch_ranks(context, nproc, false)
                     : calibrate(context, *file, recipe.value_or("quickstart"));
  const comm::LaunchedAs launched = comm::launched_as();
  const config::Resolution resolution = recipe_for_measuring(
      context, recipe.value_or("quickstart"), nproc > 1 ? nproc : launched.size, launched.rank == 0);
  if (nproc > 1) return launch_ranks(context, nproc, false);
  return run_in_world(context, resolution.config.resilience.timeout.seconds, [&](comm::World& world) {
    Bench bench(context, resolution, world);
    bench.check_names();
    bench.measure_machine();
    const std::vector<std::string>& names = context.args.words();
    if (names.size() != 1 || names[0] != "step") bench.measure_kernels();
    try {
      if (bench.wanted("step")) bench.measure_training_step();
    } catch (...) {
      bench.print_json(true);
      throw;
    }
    bench.print_json(true);
    bench.check_kernels();
    return 0;
  });
}

}  // namespace

const Command kBench = {
    .name = "bench",
    .purpose = "measure this machine: GEMM, kernels, a training step",
    .usage = "[NAME…] [-r RECIPE [a.b=c …]] [flags]",
    .examples = {{"bench", "machine, kernels, a training step of quickstart"},
                 {"bench attention", "only kernels with that in their name"},
                 {"bench step -r gpt2-124m train.micro_batch_size=4",
                  "a training step of a recipe, on random tokens"},
                 {"bench step dist.pp=2 -r quickstart --nproc 2", "the bubble of a pipeline of two ranks"},
                 {"bench --calibrate mine.yaml", "GEMMs, kernels and collectives, for `plan --cluster`"}},
    .options = {{"recipe", 'r', "RECIPE", "recipe whose training step is measured; default quickstart"},
                {"seconds", 0, "S", "seconds for each kernel; default 0.2"},
                {"calibrate", 0, "FILE", "measure this machine, and write a cluster file for `capstan plan`"},
                {"nproc", 0, "N", "measure a training step, or with --calibrate collectives too, on N ranks"},
                {"json", 0, "", "print one JSON object, each kernel as soon as it is measured"}},
    .details =
        "GEMM and attention are compared with the measured peak GEMM throughput, other kernels with the copy "
        "bandwidth.\n"
        "On a GPU (`-r RECIPE train.device=cuda`) all are measured in the recipe's compute type, by events "
        "of the device,\n"
        "also at the shapes of Llama 3 8B (8192 tokens); elsewhere these are measured where they are "
        "named.\n"
        "The bubble of a pipeline on the CPU is reported beside that of its schedule with equal times, as\n"
        "the idle time in percent of the time of the passes.\n"
        "--calibrate measures in the compute type of the recipe; on several ranks also collectives between "
        "them:\n"
        "capstan help planning.\n",
    .overrides = true,
    .max_words = SIZE_MAX,
    .run = run_bench,
};

}  // namespace capstan::cli

// capstan bench
#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "comm/world.hpp"
#include "data/loader.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "models/model.hpp"
#include "train/loop.hpp"
#include "train/setup.hpp"

namespace capstan::cli {

namespace {

std::string fixed(double value, int digits) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

// The human report appears as it is measured.
void put_unless_json(const Arguments& args, const std::string& text) {
  if (!args.has("json")) put(text);
}

struct StepRate {
  double tokens_per_second = 0, share = 0, seconds = 0;
  std::array<double, train::kPhases> phases{};
  int64_t steps = 0, micro_batches = 0;
};

// A step of half a million tokens takes an hour here: what is measured is one of few micro-batches, in about ten seconds.
config::Config shortened(config::Config config, double gemm_gflops) {
  const double flops = train::estimate_step(config, *models::build(config.model)).flops;
  const double affordable = 10 * gemm_gflops * 1e9 / flops;
  const int64_t all = *config.train.global_batch_size / config.train.micro_batch_size;
  const int64_t taken = std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, std::min<int64_t>(all, 4));
  config.train.global_batch_size = taken * config.train.micro_batch_size;
  return config;
}

// Training steps on random tokens, for at least `seconds` after one or two to warm up: the median of each number.
StepRate measure_step(const config::Config& config, double gemm_gflops, double seconds) {
  const auto world = comm::World::join();
  if (world->size() > 1) fail(ErrorCode::usage, "`bench` measures one process", "start it without mpirun");
  train::Loop loop(config, *world);
  loop.initialise();
  const auto datasets = train::open_datasets(config, nullptr);
  data::Loader loader(datasets[0], loop.loader_options());
  const double flops =
      train::estimate_step(config, loop.model()).flops * static_cast<double>(loop.micro_batches());
  const double tokens = static_cast<double>(*config.train.global_batch_size * config.model.seq_length);

  train::StepTimers timers;
  std::vector<std::pair<double, std::array<double, train::kPhases>>> taken;
  double spent = 0;
  int warm_up = 2, least = 3;
  for (int step = 0; step < warm_up + least || spent < seconds; ++step) {
    timers.start_step();
    loop.step(loader, timers);
    const double now = timers.step_seconds();
    if (now > 5) warm_up = 1, least = 2;
    if (step < warm_up) continue;
    spent += now;
    auto& row = taken.emplace_back();
    row.first = now;
    for (size_t p = 0; p < train::kPhases; ++p) row.second[p] = timers.seconds(static_cast<train::Phase>(p));
  }
  std::sort(taken.begin(), taken.end());
  const auto& median = taken[taken.size() / 2];
  return {.tokens_per_second = tokens / median.first,
          .share = flops / median.first / (gemm_gflops * 1e9),
          .seconds = median.first,
          .phases = median.second,
          .steps = static_cast<int64_t>(taken.size()),
          .micro_batches = loop.micro_batches()};
}

int run_bench(Context& context) {
  const Arguments& args = context.args;
  const double seconds = args.number("seconds", 0.01, 60).value_or(0.2);
  const std::vector<std::string>& names = args.words();
  const auto wanted = [&](std::string_view name) {
    if (names.empty()) return true;
    for (const std::string& given : names)
      if (name.find(given) != std::string_view::npos) return true;
    return false;
  };
  const bool any_kernel = names.empty() || !(names.size() == 1 && names[0] == "step");

  const auto recipe = args.value("recipe");
  if (!recipe && !context.args.overrides().empty())
    fail(ErrorCode::usage,
         "the override `" + context.args.overrides().front().text + "` changes a recipe, and none is given",
         "name one with -r RECIPE");
  config::Request request;
  request.recipe = recipe.value_or("quickstart");
  request.overrides = {config::Override::token("dataset=mock"), config::Override::token("tokenizer=none")};
  request.overrides.insert(request.overrides.end(), args.overrides().begin(), args.overrides().end());
  request.ranks = 1;
  const config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) {
    show_diagnostics(context, resolution);
    throw Exit{2};
  }
  const config::Config& config = resolution.config;

  Progress progress(!context.quiet() && !args.has("json"), context.color_err);
  const auto device = train::make_device(config.train.device, config.train.threads.value_or(0), 1);
  const auto features = kernels::cpu_features();
  nlohmann::ordered_json object = {{"schema", "capstan.bench/1"}};
  object["machine"] = {{"cores", available_cores()},
                       {"threads", device->context().pool->size()},
                       {"instruction_set", features.instruction_set},
                       {"native_bf16", features.native_bf16_gemm}};
  put_unless_json(
      args, "machine: " + std::to_string(available_cores()) + " cores, " +
                std::string(features.instruction_set) +
                (features.native_bf16_gemm ? ", multiplies bf16" : ", bf16 products widened to fp32") + "\n");
  const double gemm = kernels::measured_gemm_gflops(*device);
  const double copy = kernels::measured_copy_gbps(*device);
  object["gemm_gflops"] = gemm;
  object["copy_gbps"] = copy;
  put_unless_json(args, "gemm:    " + fixed(gemm, 1) + " GFLOP/s fp32\ncopy:    " + fixed(copy, 1) +
                            " GB/s read and written\n");
  flush_output();

  object["kernels"] = nlohmann::ordered_json::array();
  if (any_kernel) {
    progress.status("measuring kernels");
    Table table;
    for (const kernels::ProductShape& shape : kernels::product_shapes()) {
      if (!wanted(shape.name)) continue;
      const double rate = kernels::product_gflops(*device, shape, DType::f32, seconds);
      object["kernels"].push_back(
          {{"name", shape.name}, {"rate", rate}, {"unit", "GFLOP/s"}, {"share", rate / gemm}});
      table.add({shape.name, fixed(rate, 1) + " GFLOP/s", fixed(100 * rate / gemm, 0) + "%"});
    }
    for (const kernels::KernelRate& kernel : kernels::measure_kernels(*device, gemm, copy, seconds)) {
      if (!wanted(kernel.name)) continue;
      const char* unit = kernel.roof == kernels::Roof::gemm ? "GFLOP/s" : "GB/s";
      object["kernels"].push_back(
          {{"name", kernel.name}, {"rate", kernel.rate}, {"unit", unit}, {"share", kernel.share}});
      table.add({kernel.name, fixed(kernel.rate, 1) + " " + unit, fixed(100 * kernel.share, 0) + "%"});
    }
    put_unless_json(args, "\nkernels, and their share of the rate that binds them:\n" + table.text());
    flush_output();
  }

  if (wanted("step")) {
    progress.status("measuring a training step");
    const StepRate step = measure_step(shortened(config, gemm), gemm, std::max(2.0, 10 * seconds));
    nlohmann::ordered_json phases;
    Table table;
    for (size_t p = 0; p < train::kPhases; ++p) {
      const std::string name(train::name_of(static_cast<train::Phase>(p)));
      phases[name] = step.phases[p];
      if (step.phases[p] > 0)
        table.add({"  " + name, fixed(1e3 * step.phases[p], 1) + " ms",
                   fixed(100 * step.phases[p] / step.seconds, 0) + "%"});
    }
    object["step"] = {{"recipe", resolution.recipe_name},
                      {"tokens_per_second", step.tokens_per_second},
                      {"share", step.share},
                      {"seconds", step.seconds},
                      {"micro_batches", step.micro_batches},
                      {"phases", phases},
                      {"steps", step.steps}};
    put_unless_json(args, "\ntraining step of " + resolution.recipe_name + ": " +
                              human_count(step.tokens_per_second) + " tokens/s, " +
                              fixed(100 * step.share, 0) + "% of the GEMM rate (" +
                              std::to_string(step.micro_batches) +
                              (step.micro_batches == 1 ? " micro-batch" : " micro-batches") + " a step)\n" +
                              table.text());
  }
  if (args.has("json")) put(object.dump(2) + "\n");
  return 0;
}

}  // namespace

const Verb kBench = {
    .name = "bench",
    .purpose = "what this machine reaches: products, kernels, a training step",
    .usage = "[NAME…] [-r RECIPE [a.b=c …]] [flags]",
    .examples = {{"bench", "machine, kernels, a step of quickstart"},
                 {"bench attention", "only kernels with that in their name"},
                 {"bench step -r gpt2-124m train.micro_batch_size=4",
                  "a training step of a recipe, on random tokens"}},
    .options = {{"recipe", 'r', "RECIPE", "whose training step; default quickstart"},
                {"seconds", 0, "S", "spent on each kernel; default 0.2"},
                {"json", 0, "", "as one JSON object"}},
    .details =
        "Shares: products and attention of the measured GEMM rate, everything else of the copy bandwidth.\n",
    .overrides = true,
    .max_words = SIZE_MAX,
    .run = run_bench,
};

}  // namespace capstan::cli

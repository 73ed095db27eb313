// capstan bench
#include <array>
#include <cstdio>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/measured_step.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/table.hpp"
#include "train/trainer/device_setup.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/model_setup.hpp"

namespace capstan::cli {

namespace {

// Prints text while measuring, unless --json prints one object at the end.
void put_unless_json(const Arguments& args, const std::string& text) {
  if (!args.has("json")) put(text);
}

OrderedJson memory_json(const MemoryUse& use) {
  OrderedJson object;
  for (size_t category = 0; category < kMemoryCategories; ++category)
    object[std::string(name_of(static_cast<MemoryCategory>(category)))] = use.peak_by_category[category];
  object["peak"] = use.peak;
  object["cached"] = use.cached();
  object["kernel_scratch"] = use.kernel_scratch;
  return object;
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
  const config::Resolution resolution = recipe_for_measuring(context, recipe.value_or("quickstart"));
  const config::Config& config = resolution.config;
  Progress progress(!context.quiet() && !args.has("json"), context.color_err);
  const auto device = train::make_device(config.train.device, config.train.threads.value_or(0), 1);
  const auto features = kernels::cpu_features();
  OrderedJson object = {{"schema", "capstan.bench/1"}};
  object["machine"] = {{"cores", available_cores()},
                       {"threads", device->context().pool->size()},
                       {"instruction_set", features.instruction_set},
                       {"native_bf16", features.native_bf16_gemm}};
  put_unless_json(
      args, "machine: " + std::to_string(available_cores()) + " cores, " +
                std::string(features.instruction_set) +
                (features.native_bf16_gemm ? ", native bf16 GEMM" : ", bf16 GEMM computed in fp32") + "\n");
  const double gemm = kernels::roof_gemm_gflops(*device);
  // The step is compared with a GEMM of its compute type.
  const DType type = kernels::product_type(train::compute_type(config.mixed_precision));
  const double step_gemm = type == DType::f32 ? gemm : kernels::roof_gemm_gflops(*device, type);
  const double copy = kernels::measured_copy_gbps(*device);
  object["gemm_gflops"] = gemm;
  object["step_gemm_gflops"] = step_gemm;
  object["copy_gbps"] = copy;
  put_unless_json(args, "gemm:    " + fixed(gemm, 1) +
                            " GFLOP/s fp32 (peak: the best of this program and oneDNN)" +
                            (type == DType::bf16 ? ", " + fixed(step_gemm, 1) + " GFLOP/s bf16" : "") +
                            "\ncopy:    " + fixed(copy, 1) + " GB/s read and written\n");
  flush_output();

  object["kernels"] = OrderedJson::array();
  if (any_kernel) {
    progress.status("measuring kernels");
    Table table;
    for (const kernels::ProductShape& shape : kernels::product_shapes()) {
      if (!wanted(shape.name)) continue;
      const double rate = kernels::product_gflops(*device, shape, DType::f32, seconds);
      const double onednn = kernels::onednn_product_gflops(shape, device->context().pool->size(), seconds);
      object["kernels"].push_back({{"name", shape.name},
                                   {"rate", rate},
                                   {"unit", "GFLOP/s"},
                                   {"fraction_of_peak", rate / gemm},
                                   {"onednn_rate", onednn}});
      table.add({shape.name, fixed(rate, 1) + " GFLOP/s", fixed(100 * rate / gemm, 0) + "%",
                 "oneDNN " + fixed(onednn, 1)});
    }
    for (const kernels::KernelRate& kernel : kernels::measure_kernels(*device, gemm, copy, seconds)) {
      if (!wanted(kernel.name)) continue;
      const char* unit = kernel.peak == kernels::Peak::gemm ? "GFLOP/s" : "GB/s";
      object["kernels"].push_back(
          {{"name", kernel.name}, {"rate", kernel.rate}, {"unit", unit}, {"fraction_of_peak", kernel.share}});
      table.add({kernel.name, fixed(kernel.rate, 1) + " " + unit, fixed(100 * kernel.share, 0) + "%"});
    }
    put_unless_json(args,
                    "\nkernels, as % of the peak GEMM throughput or of the copy bandwidth:\n" + table.text());
    flush_output();
  }

  if (wanted("step")) {
    progress.status("measuring a training step");
    const StepMeasurement step =
        measure_step(shortened(config, step_gemm), step_gemm, std::max(2.0, 10 * seconds));
    OrderedJson phases;
    Table table;
    for (size_t p = 0; p < train::kPhases; ++p) {
      const std::string name(train::name_of(static_cast<train::Phase>(p)));
      phases[name] = step.phases[p];
      if (step.phases[p] > 0)
        table.add({"  " + name, fixed(1e3 * step.phases[p], 1) + " ms",
                   fixed(100 * step.phases[p] / step.seconds, 0) + "%"});
    }
    OrderedJson operations = OrderedJson::array();
    Table by_operation;
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
      if (row.seconds > 0.002 * step.seconds)
        by_operation.add(
            {"  " + row.name + " " + row.phase, std::to_string(row.calls) + "x",
             fixed(1e3 * row.seconds, 1) + " ms", fixed(100 * row.seconds / step.seconds, 1) + "%",
             rate > 0
                 ? fixed(rate, 0) + " GFLOP/s, " +
                       fixed(100 * rate / (step.concurrent_gflops > 0 ? step.concurrent_gflops : step_gemm),
                             0) +
                       "% of GEMM"
                 : fixed(bandwidth, 1) + " GB/s, " + fixed(100 * bandwidth / copy, 0) + "% of copy"});
    }
    object["step"] = {{"recipe", resolution.recipe_name},
                      {"tokens_per_second", step.tokens_per_second},
                      {"fraction_of_peak", step.fraction_of_peak},
                      {"fraction_of_concurrent", step.fraction_of_concurrent},
                      {"concurrent_gflops", step.concurrent_gflops},
                      {"seconds", step.seconds},
                      {"micro_batches", step.micro_batches},
                      {"phases", phases},
                      {"operations", operations},
                      {"memory", memory_json(step.memory)},
                      {"memory_estimated", memory_json(step.estimated)},
                      {"steps", step.steps}};
    put_unless_json(
        args, "\ntraining step of " + resolution.recipe_name + ": " + human_count(step.tokens_per_second) +
                  " tokens/s, " + fixed(100 * step.fraction_of_peak, 1) + "% of peak GEMM throughput" +
                  (step.fraction_of_concurrent > 0 ? ", " + fixed(100 * step.fraction_of_concurrent, 1) +
                                                         "% of the " + fixed(step.concurrent_gflops, 1) +
                                                         " GFLOP/s of a GEMM run between its operations"
                                                   : "") +
                  " (" + std::to_string(step.micro_batches) +
                  (step.micro_batches == 1 ? " micro-batch" : " micro-batches") + " a step)\n" +
                  table.text() + "by operation (F forward, B backward, W weight gradients):\n" +
                  by_operation.text() + "peak memory: " + train::memory_text(step.memory) +
                  "\nestimated:   " + train::memory_text(step.estimated) + "\n");
  }
  if (args.has("json")) put(object.dump(2) + "\n");
  return 0;
}

}  // namespace

const Command kBench = {
    .name = "bench",
    .purpose = "measure this machine: GEMM, kernels, a training step",
    .usage = "[NAME…] [-r RECIPE [a.b=c …]] [flags]",
    .examples = {{"bench", "machine, kernels, a training step of quickstart"},
                 {"bench attention", "only kernels with that in their name"},
                 {"bench step -r gpt2-124m train.micro_batch_size=4",
                  "a training step of a recipe, on random tokens"}},
    .options = {{"recipe", 'r', "RECIPE", "recipe whose training step is measured; default quickstart"},
                {"seconds", 0, "S", "seconds for each kernel; default 0.2"},
                {"json", 0, "", "as one JSON object"}},
    .details =
        "GEMM and attention are compared with the measured peak GEMM throughput, other kernels with the copy "
        "bandwidth.\n",
    .overrides = true,
    .max_words = SIZE_MAX,
    .run = run_bench,
};

}  // namespace capstan::cli

// The trainer on every device: training, validation, saves of both kinds, a stop, a resume, generation
// and evaluation, with the numbers of the CPU.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "support/device_kind.hpp"
#include "support/devices.hpp"
#include "support/sanitized.hpp"
#include "support/tiny.hpp"
#include "train/inference/evaluate.hpp"
#include "train/inference/generate.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/trainer/device_batch.hpp"
#include "train/trainer/trainer.hpp"

using namespace capstan;
using namespace capstan::train;

namespace {

namespace fs = std::filesystem;

struct Silent final : ProgressSink {
  void line(const std::string&) override {}
  void warning(const std::string& text) override { FAIL_CHECK(text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }
};

config::Config small(DeviceType device, bool async_save) {
  auto c = testing::tiny_config(true, 1);
  c.train.device = test::device_kind(device);
  c.train.threads = 2;
  c.train.train_iters = 6;
  c.tokenizer.tokenizer_type = config::TokenizerKind::byte;
  c.model.vocab_size = 257, c.model.padded_vocab_size = 288;
  c.model.hidden_dropout = 0.1;
  c.mixed_precision.params_dtype = config::Precision::bf16;
  c.checkpoint.save_interval = 2;
  c.checkpoint.async_save = async_save;
  c.validation.eval_interval = 3;
  c.logger.log_interval = 1;
  return c;
}

// Everything in a run's metrics that does not speak of time, row by row.
std::vector<std::string> numbers_of(const fs::path& run) {
  std::ifstream in(run / "metrics.jsonl");
  std::vector<std::string> rows;
  for (std::string line; std::getline(in, line);) {
    const auto row = capstan::json_of(line);
    std::string text;
    // Not the memory: on the CPU it includes the buffers from which micro-batches are copied.
    for (const char* key : {"step", "event", "loss", "grad_norm", "perplexity"})
      if (row.contains(key)) text += capstan::dump_json(row[key]) + " ";
    if (row.contains("loss")) rows.push_back(text);
  }
  return rows;
}

struct Result {
  std::vector<std::string> full, resumed;
  std::string text;
  double loss = 0;
};

Result run_on(DeviceType device, bool async_save, const fs::path& root) {
  const auto world = comm::World::join();
  Silent sink;
  RunOptions options;
  options.recipe = {.name = "tiny", .given = "", .resolved = "name: tiny\n", .hash = "0", .command = "test"};
  auto config = small(device, async_save);
  Result result;
  options.run_dir = root / "uninterrupted";
  const Outcome full = train::train(config, *world, options, sink);
  CHECK(full.step == 6);
  result.full = numbers_of(options.run_dir);

  options.run_dir = root / "resumed";
  config.train.exit_interval = 4;
  CHECK(train::train(config, *world, options, sink).step == 4);
  config.train.exit_interval.reset();
  options.resume = Resume::existing;
  CHECK(train::train(config, *world, options, sink).step == 6);
  result.resumed = numbers_of(options.run_dir);

  LoadedModel model(full.checkpoint, config, *world);
  CHECK(model.device().type() == device);
  GenerateOptions generation;
  generation.prompt = "ab";
  generation.max_tokens = 12;
  generation.on_text = [&](const std::string& text) { result.text += text; };
  CHECK(generate(model, generation).tokens > 0);
  EvalOptions evaluation;
  evaluation.text = "a text that is longer than the model's window of two dozen";
  result.loss = evaluate_text(model, evaluation).loss;
  // Only the batch is copied for a further window.
  const auto copied = [&] {
    const int64_t before = model.device().copied_bytes(Queue::host_to_device);
    data::MicroBatch window = data::MicroBatch::zeros(1, config.model.seq_length);
    window.sample_ids = {0}, window.cu_seqlens = {{0, static_cast<int32_t>(config.model.seq_length)}};
    CHECK(model.token_losses(window).size() == static_cast<size_t>(config.model.seq_length));
    return model.device().copied_bytes(Queue::host_to_device) - before;
  };
  // Tokens, labels, loss mask and positions of 4 bytes each, at cache lines.
  CHECK(copied() <= 4 * (4 * config.model.seq_length + 64));
  return result;
}

}  // namespace

TEST_CASE("a run, its resume, its text and its loss are the same on the checked device as on the CPU") {
  const fs::path root = fs::temp_directory_path() / ("capstan-devices-" + std::to_string(::getpid()));
  const Result cpu = run_on(DeviceType::cpu, false, root / "cpu");
  CHECK(cpu.full.size() == 8);  // six steps, two validations
  for (const bool async_save : {false, true}) {
    const Result checked =
        run_on(DeviceType::checked, async_save, root / (async_save ? "checked-async" : "checked"));
    CHECK(checked.full == cpu.full);
    CHECK(checked.resumed == cpu.resumed);
    CHECK(checked.text == cpu.text);
    CHECK(checked.loss == cpu.loss);
  }
  fs::remove_all(root);
}

TEST_CASE_TEMPLATE("CUDA kernels: a resume, asynchronous saves and generation, near the numbers of the CPU",
                   D, CUDA_KERNEL_DEVICES) {
  const fs::path root = fs::temp_directory_path() / ("capstan-cuda-kernels-" + std::to_string(::getpid()));
  const Result cpu = run_on(DeviceType::cpu, false, root / "cpu");
  const Result saving = run_on(D::type, true, root / "async");
  // A sanitizer build takes one kind of save.
  const Result plain = test::kSanitized ? saving : run_on(D::type, false, root / "plain");
  CHECK(plain.full.size() == cpu.full.size());
  CHECK(plain.resumed == plain.full);
  CHECK(saving.full == plain.full);
  CHECK(saving.resumed == plain.full);
  CHECK(saving.text == plain.text);
  CHECK(saving.loss == plain.loss);
  // Parameters and activations in bf16, after six steps.
  CHECK(plain.loss == doctest::Approx(cpu.loss).epsilon(5e-3));
  fs::remove_all(root);
}

TEST_CASE_TEMPLATE("a packed batch has its documents as starts and as cumulative lengths", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  data::MicroBatch batch;
  batch.rows = 3;
  batch.sequence_length = 8;
  batch.tokens.assign(24, 1);
  batch.labels = batch.tokens;
  batch.loss_mask.assign(24, 1.0f);
  batch.position_ids.assign(24, 0);
  batch.cu_seqlens = {{0, 3, 7, 8}, {0, 8}, {0, 2, 8}};
  const models::Batch all = upload(*device, batch, false);
  CHECK(all.cu_seqlens.to_host<int32_t>() == std::vector<int32_t>{0, 3, 7, 8, 16, 18, 24});
  CHECK(all.max_seqlen == 8);
  const std::vector<int32_t> starts{0, 0, 0, 3, 3, 3, 3, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2};
  CHECK(all.document_start.to_host<int32_t>() == starts);
  // A rank of a context-parallel group has the starts of its rows, and the lengths of the full sequences.
  const models::Batch part = upload(*device, batch, false, {.ranks = 2, .rank = 1});
  CHECK(part.cu_seqlens.to_host<int32_t>() == all.cu_seqlens.to_host<int32_t>());
  CHECK(part.document_start.to_host<int32_t>() == std::vector<int32_t>{0, 3, 3, 3, 0, 0, 0, 0, 2, 2, 2, 2});

  batch.cu_seqlens = {{0, 8}, {0, 8}, {0, 8}};
  const models::Batch plain = upload(*device, batch, false);
  CHECK(!plain.document_start.defined());
  CHECK(!plain.cu_seqlens.defined());
}

TEST_CASE_TEMPLATE("a batch for multi-token prediction has the later tokens of a rank's positions", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  data::MicroBatch batch = data::MicroBatch::zeros(1, 8);
  for (int32_t i = 0; i < 8; ++i) {
    const auto at = static_cast<size_t>(i);
    batch.tokens[at] = 10 + i, batch.labels[at] = 11 + i, batch.position_ids[at] = i;
    batch.loss_mask[at] = 1;
  }
  batch.cu_seqlens = {{0, 8}};
  const MtpInputs two{.depths = 2, .loss_factor = 0.5, .positions = true};
  // Of four chunks of two tokens a rank has the second and the third.
  const models::Batch part = upload(*device, batch, false, {.ranks = 2, .rank = 1}, two);
  REQUIRE(part.later.size() == 2);
  CHECK(part.tokens.to_host<int32_t>() == std::vector<int32_t>{12, 13, 14, 15});
  CHECK(part.later[0].tokens.to_host<int32_t>() == std::vector<int32_t>{13, 14, 15, 16});
  CHECK(part.later[1].labels.to_host<int32_t>() == std::vector<int32_t>{15, 16, 17, 18});
  CHECK(part.later[1].positions.to_host<int32_t>() == std::vector<int32_t>{4, 5, 6, 7});
  // Eight tokens weigh as much as the six that have a label two places further on.
  const float weight = static_cast<float>(8.0 / 6.0) * 0.5f;
  CHECK(part.later[1].loss_mask.to_host<float>() == std::vector<float>(4, weight));
  const models::Batch first = upload(*device, batch, false, {.ranks = 2, .rank = 0}, two);
  CHECK(first.later[1].tokens.to_host<int32_t>() == std::vector<int32_t>{12, 13, 0, 0});
  CHECK(first.later[1].loss_mask.to_host<float>() == std::vector<float>{weight, weight, 0, 0});
  CHECK(!upload(*device, batch, false, {}, {.depths = 1, .loss_factor = 1}).later[0].positions.defined());
  CHECK(upload(*device, batch, false).later.empty());
}

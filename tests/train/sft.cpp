// Fine-tuning data in training: packing changes nothing but the time, and a resumed run sees what an
// uninterrupted one sees.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>

#include "base/philox.hpp"
#include "support/temporary_directory.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;

namespace {

config::Config sft_config(bool llama, const std::string& file, bool packing) {
  config::Config config = capstan::testing::tiny_config(llama, 1);
  config.model.vocab_size = 257, config.model.padded_vocab_size = 288;
  config.model.seq_length = 48, config.model.max_position_embeddings = 48;
  config.tokenizer.tokenizer_type = config::TokenizerKind::byte;
  config.dataset.kind = config::DatasetKind::sft;
  config.dataset.train_files = {{file, file}};
  config.dataset.split = "1,0,0";
  config.dataset.packing = packing;
  config.train.micro_batch_size = 1;
  return config;
}

// Prompts and completions of uneven lengths, 6 to 44 tokens.
std::string write_samples(const test::TemporaryDirectory& directory, int count) {
  const std::string path = (directory.path() / "samples.jsonl").string();
  PhiloxSequence random(philox_key(5, purpose::test, 1));
  std::ofstream out(path);
  for (int i = 0; i < count; ++i) {
    const auto text = [&](uint64_t most) {
      std::string result;
      for (uint64_t left = 2 + random.below(most); left > 0; --left)
        result += static_cast<char>('a' + random.below(26));
      return result;
    };
    const std::string prompt = text(20);
    out << R"({"prompt": ")" << prompt << R"(", "completion": ")" << text(20) << "\"}\n";
  }
  return path;
}

// The first step over an epoch.
StepResult epoch_step(config::Config config) {
  const auto tokenizer = load_tokenizer(config);
  const auto data = open_datasets(config, tokenizer.get());
  config.train.global_batch_size = data[0]->epoch_samples();
  StepRunner runner(config, test::world());
  runner.initialize();
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  timers.start_step();
  return runner.train_step(loader, timers);
}

}  // namespace

TEST_CASE("packed samples have the loss and the gradients of samples in rows of their own") {
  const test::TemporaryDirectory directory;
  const std::string file = write_samples(directory, 30);
  for (const bool llama : {false, true}) {
    CAPTURE(llama);
    const StepResult packed = epoch_step(sft_config(llama, file, true)),
                     padded = epoch_step(sft_config(llama, file, false));
    CHECK(packed.loss_tokens == padded.loss_tokens);
    CHECK(packed.loss_tokens > 100);
    CHECK(packed.loss == doctest::Approx(padded.loss).epsilon(1e-6));
    CHECK(packed.gradient_norm == doctest::Approx(padded.gradient_norm).epsilon(1e-6));
  }
}

TEST_CASE("a run on fine-tuning data continues where another one stood") {
  const test::TemporaryDirectory directory;
  const auto config = sft_config(true, write_samples(directory, 30), true);
  const auto tokenizer = load_tokenizer(config);
  const auto rows_of = [&](int64_t steps, int64_t consumed) {
    const auto data = open_datasets(config, tokenizer.get());
    StepRunner runner(config, test::world());
    runner.initialize();
    data::LoaderOptions options = runner.loader_options();
    options.consumed_samples = consumed;
    data::Loader loader(data[0], options);
    std::vector<std::vector<int32_t>> rows;
    for (int64_t i = 0; i < steps * runner.micro_batches(); ++i) rows.push_back(loader.next().tokens);
    return rows;
  };
  // Far into other epochs.
  const auto full = rows_of(40, 0);
  const auto rest = rows_of(15, 25 * *config.train.global_batch_size);
  CHECK(std::equal(rest.begin(), rest.end(), full.end() - static_cast<std::ptrdiff_t>(rest.size())));
}

TEST_CASE("training on fine-tuning samples lowers their loss") {
  const test::TemporaryDirectory directory;
  const auto config = sft_config(true, write_samples(directory, 12), true);
  const auto tokenizer = load_tokenizer(config);
  const auto data = open_datasets(config, tokenizer.get());
  CHECK(data[0]->summary().find("12 samples") != std::string::npos);
  StepRunner runner(config, test::world());
  runner.initialize();
  data::Loader loader(data[0], runner.loader_options());
  StepTimers timers;
  double first = 0, last = 0;
  for (int i = 0; i < 30; ++i) {
    timers.start_step();
    last = runner.train_step(loader, timers).loss;
    if (i == 0) first = last;
  }
  CHECK(first == doctest::Approx(std::log(257.0)).epsilon(0.05));
  CHECK(last < 0.7 * first);
}

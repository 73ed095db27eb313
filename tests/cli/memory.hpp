// Shared by the tests of memory: a recipe, the estimate of `show --step`, the range of the resident memory.
#pragma once

#include <doctest/doctest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "process.hpp"

namespace capstan::test {

using Words = std::vector<std::string>;

// Range of the resident memory beyond the estimate: program and libraries, stacks, samples of the loader, and
// parts of files that are written or read. docs/performance.md gives it.
inline constexpr double kLeastBase = 20, kMaxBase = 64;  // MiB

// Some 10 to 14 million parameters, and steps of seconds on one core.
inline Words recipe(const Words& more) {
  Words words{"quickstart",
              "dataset=mock",
              "tokenizer=none",
              "model.num_layers=2",
              "model.hidden_size=512",
              "model.ffn_hidden_size=1024",
              "model.vocab_size=16384",
              "model.seq_length=128",
              "train.micro_batch_size=2",
              "train.global_batch_size=4",
              "train.train_iters=2",
              "train.threads=1",
              "validation.eval_interval=null",
              "checkpoint.save_interval=1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

inline Finished in(const ScratchDirectory& scratch, const std::string& command, Words words,
                   const Words& more = {}) {
  Launch launch;
  launch.directory = scratch.path();
  words.insert(words.begin(), command);
  words.insert(words.end(), more.begin(), more.end());
  launch.arguments = std::move(words);
  return run(launch);
}

inline double mib(const std::string& text) {
  std::istringstream stream(text);
  double value = 0;
  std::string unit;
  stream >> value >> unit;
  REQUIRE_MESSAGE((unit.starts_with("MiB") || unit.starts_with("GiB")), text);
  return unit.starts_with("GiB") ? 1024 * value : value;
}

// Estimated memory of the stage that needs the most, as printed by `show --step`.
inline double estimated_mib(const ScratchDirectory& scratch, const Words& words, const Words& more = {}) {
  const Finished shown = in(scratch, "show", words, more);
  REQUIRE_MESSAGE(shown.code == 0, shown.err);
  const size_t at = shown.out.find("largest: rank ");
  REQUIRE(at != std::string::npos);
  return mib(shown.out.substr(shown.out.find(": ", at + 10) + 2));
}

inline void check_resident(double resident, double estimated) {
  INFO("resident ", resident, " MiB, estimated ", estimated, " MiB");
  CHECK(resident >= 0.95 * estimated + kLeastBase);
  CHECK(resident <= 1.05 * estimated + kMaxBase);
}

}  // namespace capstan::test

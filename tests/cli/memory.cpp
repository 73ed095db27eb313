// The estimated memory agrees with the resident memory that the system reports for the process, also with
// saves and resumes. Every command applies the memory limit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "base/json.hpp"
#include "memory.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
using nlohmann::json;

TEST_CASE(
    "resident memory is what the estimate says, with saves, adapters, evaluation and in every precision") {
  const std::pair<const char*, Words> cases[] = {
      {"synchronous checkpoints", {}},
      {"asynchronous checkpoints", {"checkpoint.async_save=true"}},
      {"bf16", {"mixed_precision=bf16_mixed"}},
      {"fp16", {"mixed_precision=fp16_mixed"}},
      {"many tokens",
       {"model.seq_length=512", "train.micro_batch_size=4", "model.vocab_size=2048", "train.train_iters=1"}},
      {"evaluation of more at once",
       {"validation.eval_interval=1", "validation.eval_iters=1", "validation.eval_micro_batch_size=8",
        "validation.eval_global_batch_size=8"}},
      {"recomputation",
       {"model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1",
        "train.micro_batch_size=4"}},
      {"reruns", {"resilience.rerun_mode=validate_results"}},
      {"adapters", {"peft=lora", "peft.random_base=true", "model.vocab_size=32768"}},
      {"adapters beside 4 bits",
       {"peft=qlora", "peft.random_base=true", "model.vocab_size=32768", "mixed_precision=bf16_mixed"}},
  };
  for (const auto& [name, more] : cases) {
    CAPTURE(name);
    const ScratchDirectory scratch;
    const Words words = recipe(more);
    const double estimated = estimated_mib(scratch, words, {"--step"});
    const Finished trained = in(scratch, "train", words, {"--run-dir", "r"});
    REQUIRE_MESSAGE(trained.code == 0, trained.err);
    check_resident(trained.resident_mib, estimated);
    // The memory that the allocator has reserved in the first step. Only a larger evaluation needs more.
    const size_t measured = trained.err.find("memory measured: ");
    REQUIRE_MESSAGE(measured != std::string::npos, trained.err);
    const std::string text = trained.err.substr(measured, trained.err.find('\n', measured) - measured);
    const std::string reserved = text.substr(text.find("; ") + 2);
    const bool grows = contains(trained.err, " of them since step ");
    CHECK(grows == (name == std::string("evaluation of more at once")));
    if (!grows) CHECK(mib(reserved) == doctest::Approx(estimated).epsilon(0.02));
    CHECK_MESSAGE((contains(reserved, " reserved in ") && reserved.ends_with(" requests")), text);
    // The log says the same, for the process.
    std::istringstream lines(read_text(scratch.file("r/metrics.jsonl")));
    double said = 0;
    for (std::string line; std::getline(lines, line);) {
      const json row = capstan::json_of(line);
      if (row.contains("resident_bytes")) said = row["resident_bytes"].get<double>() / (1 << 20);
    }
    CHECK(said == doctest::Approx(trained.resident_mib).epsilon(0.02));
    if (name != cases[0].first) continue;
    // Memory in which a resumed run, or one that begins with external weights, reads its files is freed.
    const Finished resumed = in(
        scratch, "train", words,
        {"--run-dir", "r", "--resume", "train.train_iters=3", "scheduler.override_opt_param_scheduler=true"});
    REQUIRE_MESSAGE(resumed.code == 0, resumed.err);
    check_resident(resumed.resident_mib, estimated);
    const Finished written = in(scratch, "convert", {"r", "hf:written"});
    REQUIRE_MESSAGE(written.code == 0, written.err);
    CHECK(written.resident_mib < kMaxBase + 32);
    const Finished begun =
        in(scratch, "train", words,
           {"--run-dir", "begun", "checkpoint.pretrained_checkpoint=hf:written", "train.train_iters=1"});
    REQUIRE_MESSAGE(begun.code == 0, begun.err);
    check_resident(begun.resident_mib, estimated);
  }
}

namespace {

// Fine-tuning data of samples whose question and answer have that many characters each.
void write_samples(const ScratchDirectory& scratch, int samples, size_t characters) {
  std::string lines;
  const std::string text(characters, 'x');
  for (int i = 0; i < samples; ++i)
    lines.append(R"({"prompt": "q)")
        .append(text)
        .append(R"(", "completion": "a)")
        .append(text)
        .append("\"}\n");
  scratch.write("data.jsonl", lines);
}

// The estimate of memory that a run logs before its first step.
double announced_mib(const Finished& trained) {
  const size_t at = trained.err.find(" per step per rank, about ");
  REQUIRE_MESSAGE(at != std::string::npos, trained.err);
  return mib(trained.err.substr(at + 26));
}

}  // namespace

TEST_CASE("reading many short samples takes no more memory than the base") {
  const ScratchDirectory scratch;
  write_samples(scratch, 60'000, 120);
  const Words words = tiny_recipe({"train.threads=1", "train.train_iters=1", "model.seq_length=512",
                                   "model.vocab_size=257", "tokenizer=byte", "dataset=sft",
                                   "dataset.train_files=data.jsonl", "validation.eval_interval=null"});
  const Finished trained = in(scratch, "train", words, {"--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  check_resident(trained.resident_mib, announced_mib(trained));
}

TEST_CASE("the indices of Megatron's order are part of the estimate and of what the limit holds") {
  const ScratchDirectory scratch;
  std::string lines;
  for (int i = 0; i < 20'000; ++i) lines += "{\"text\": \"a\"}\n";
  scratch.write("docs.jsonl", lines);
  const Finished made = in(
      scratch, "data", {"prepare", "docs.jsonl", "--tokenizer", "byte", "--append-eod", "--output", "docs"});
  REQUIRE_MESSAGE(made.code == 0, made.err);
  // Two tokens a document: eight documents a sample, of which the run reads two.
  const Words words = tiny_recipe({"train.threads=1", "train.train_iters=1500000", "train.exit_interval=1",
                                   "model.vocab_size=257", "tokenizer=byte", "dataset=gpt",
                                   "dataset.data_path=docs_text_document", "dataset.split='1,0,0'",
                                   "dataset.sample_order=megatron", "checkpoint.save_interval=null"});
  const double estimated = estimated_mib(scratch, words, {"--step"});
  CHECK(estimated > 3e6 * (8 * 4 + 4 + 2) / (1 << 20));
  const Finished trained = in(scratch, "train", words, {"--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 75, trained.err);  // train.exit_interval
  CHECK(announced_mib(trained) == doctest::Approx(estimated).epsilon(0.02));
  check_resident(trained.resident_mib, estimated);
  for (const Finished& one :
       {in(scratch, "check", words, {"resilience.memory_limit=100MiB"}),
        in(scratch, "train", words, {"resilience.memory_limit=100MiB", "--run-dir", "l"})}) {
    CHECK_MESSAGE(one.code == 3, one.err);
    CHECK_MESSAGE(contains(one.err, "resilience.memory_limit allows 100.0 MiB"), one.err);
  }
  const Finished unread = in(scratch, "show", words, {"--step", "dataset.data_path=missing_text_document"});
  CHECK_MESSAGE(contains(unread.out, "\nwithout the indices of Megatron's order: not found: "), unread.out);
}

TEST_CASE("evaluation and generation take no more memory than the limit allows") {
  const ScratchDirectory scratch;
  const Finished trained =
      in(scratch, "train", recipe({"tokenizer=byte", "model.vocab_size=257", "train.train_iters=1"}),
         {"--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  scratch.write("text.txt", "the captain turns the capstan");
  for (const Words& words :
       {Words{"eval", "r", "--text", "text.txt"}, Words{"generate", "r", "--prompt", "a"}}) {
    CAPTURE(words[0]);
    Words more(words.begin() + 1, words.end());
    CHECK(in(scratch, words[0], more, {"resilience.memory_limit=100MiB"}).code == 0);
    const Finished refused = in(scratch, words[0], more, {"resilience.memory_limit=100KiB"});
    CHECK(refused.code == 3);
    CHECK_MESSAGE(contains(refused.err, "resilience.memory_limit allows 100.0 KiB"), refused.err);
  }
}

TEST_CASE("fine-tuning data are part of the estimate and of what the limit holds") {
  const ScratchDirectory scratch;
  write_samples(scratch, 80'000, 120);
  const Words words = tiny_recipe({"train.threads=1", "train.train_iters=1", "model.seq_length=256",
                                   "model.vocab_size=257", "tokenizer=byte", "dataset=sft",
                                   "dataset.train_files=data.jsonl", "validation.eval_interval=null"});
  const Finished trained = in(scratch, "train", words, {"--run-dir", "r"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  const double estimated = announced_mib(trained);
  CHECK(estimated > 4e-6 * 80'000 * 240 * 0.95);  // four bytes a token
  check_resident(trained.resident_mib, estimated);
  // `show --step` and plans say the same, whether or not there is a limit.
  CHECK(estimated_mib(scratch, words, {"--step"}) == doctest::Approx(estimated).epsilon(0.02));
  Words sweep;
  for (const std::string& word : words)
    if (word != "dataset=mock" && word != "tokenizer=none" && word != "model.vocab_size=256" &&
        word != "model.seq_length=16")
      sweep.push_back(word);
  sweep.insert(sweep.begin(), "plan");
  sweep.insert(sweep.end(), {"optimizer.lr=1e-3,2e-3", "--out", "s", "--json"});
  const json plan = capstan::json_of(in(scratch, "sweep", sweep).out);
  REQUIRE(plan["trials"].size() == 2);
  for (const json& trial : plan["trials"])
    CHECK(trial["memory_bytes"].get<double>() / (1 << 20) == doctest::Approx(estimated).epsilon(0.02));
  const Finished without = in(scratch, "show", words, {"--step", "dataset.train_files=none.jsonl"});
  CHECK_MESSAGE(contains(without.out, "\nwithout fine-tuning data: not found: "), without.out);
  const Words limit{"resilience.memory_limit=50MiB"};
  const Finished checked = in(scratch, "check", words, {limit[0], "--files"}),
                 unread = in(scratch, "check", words, limit),
                 shown = in(scratch, "show", words, {limit[0], "--step"}),
                 refused = in(scratch, "train", words, {limit[0], "--run-dir", "limited"});
  for (const Finished& one : {checked, unread, shown, refused}) {
    CHECK_MESSAGE(one.code == 3, one.err);
    CHECK_MESSAGE(contains(one.err, "resilience.memory_limit allows 50.0 MiB"), one.err);
  }
}

TEST_CASE("check, show --step and train refuse alike what a limit of host memory does not allow") {
  const ScratchDirectory scratch;
  Words words = tiny_recipe({"train.threads=1", "train.device=checked", "checkpoint.async_save=true",
                             "checkpoint.save_interval=2", "resilience.memory_limit_host=100KiB"});
  const Finished checked = in(scratch, "check", words), shown = in(scratch, "show", words, {"--step"}),
                 trained = in(scratch, "train", words, {"--run-dir", "r"});
  for (const Finished& refused : {checked, shown, trained}) {
    CHECK_MESSAGE(refused.code == 3, refused.err);
    CHECK_MESSAGE(contains(refused.err, " of host memory ("), refused.err);
    CHECK(contains(refused.err, "snapshot "));
    CHECK(contains(refused.err, "resilience.memory_limit_host allows 100.0 KiB"));
    CHECK(contains(refused.err, "checkpoint.async_save=false"));
  }
  CHECK(contains(shown.out, "host memory"));
  words.push_back("checkpoint.async_save=false");
  CHECK(in(scratch, "check", words).code == 0);
}

// As `plan` proposes it, and quoted for a shell. A limit between the needs of two forms of recomputation.
TEST_CASE("a refusal proposes recomputation of norms before that of complete layers") {
  const ScratchDirectory scratch;
  const Finished refused = run_in(
      scratch, {"check", "quickstart", "dataset=mock", "train.threads=2", "resilience.memory_limit=88MiB"});
  CHECK(refused.code == 3);
  CHECK_MESSAGE(contains(refused.err,
                         "model.recompute_granularity=selective 'model.recompute_modules=[layernorm,mlp]' ("),
                refused.err);
}

TEST_CASE("limits of device and host count optimizer state where it lies") {
  const ScratchDirectory scratch;
  const Words offload = {"optimizer.optimizer_cpu_offload=true"};
  const Words on_host = tiny_recipe(
      {"train.threads=1", "train.device=checked", "resilience.memory_limit_host=100KiB", offload[0]});
  for (const Finished& refused :
       {in(scratch, "check", on_host), in(scratch, "train", on_host, {"--run-dir", "r"})}) {
    CHECK_MESSAGE(refused.code == 3, refused.err);
    CHECK_MESSAGE(contains(refused.err, " of host memory ("), refused.err);
    CHECK(contains(refused.err, "moments "));
    CHECK(contains(refused.err, "optimizer.optimizer_cpu_offload=false ("));
  }
  CHECK(in(scratch, "check", on_host, {"optimizer.optimizer_cpu_offload=false"}).code == 0);
  // State in a file does not count, but the chunks in memory do.
  const Words in_file = recipe({"train.device=checked", offload[0], "optimizer.optimizer_offload_path=.",
                                "optimizer.optimizer_offload_chunk_size=4096"});
  const Words small = {"resilience.memory_limit_host=2MiB", "checkpoint.async_save=false"};
  CHECK(in(scratch, "check", in_file, small).code == 0);
  CHECK(in(scratch, "check", in_file, {"resilience.memory_limit_host=50KiB"}).code == 3);
  CHECK(in(scratch, "check", recipe({"train.device=checked", offload[0]}), small).code == 3);
  CHECK(contains(in(scratch, "show", in_file, {"--step"}).out, "optimizer state in a file"));
  // A limit between the device's needs with and without offload.
  const Words words = recipe({"train.device=checked"});
  const double all = estimated_mib(scratch, words, {"--step"}),
               less = estimated_mib(scratch, words, {"--step", offload[0]});
  CHECK(less < all);
  const std::string limit =
      "resilience.memory_limit=" + std::to_string(std::lround(1024 * (all + less) / 2)) + "KiB";
  CHECK(in(scratch, "check", words, {limit}).code == 3);
  CHECK(in(scratch, "check", words, {limit, offload[0]}).code == 0);
}

namespace {

// The parts of a line between `separator`s, without the blanks around them.
Words cells_of(const std::string& line, const std::string& separator) {
  Words cells;
  for (size_t begin = 0; begin < line.size();) {
    const size_t end = std::min(line.find(separator, begin), line.size());
    std::string cell = line.substr(begin, end - begin);
    cell.erase(0, cell.find_first_not_of(' '));
    cell.erase(cell.find_last_not_of(' ') + 1);
    if (!cell.empty()) cells.push_back(cell);
    begin = end + separator.size();
  }
  return cells;
}

}  // namespace

TEST_CASE("the table of a step in docs/performance.md is what the command above it prints") {
  std::istringstream page(read_text(std::string(kSourceDirectory) + "/docs/performance.md"));
  std::string line;
  const std::string begin = "    capstan show ";
  while (std::getline(page, line) && !line.starts_with(begin)) continue;
  REQUIRE(line.starts_with(begin));
  const ScratchDirectory scratch;
  const Finished shown = run_in(scratch, cells_of(line.substr(std::string("    capstan ").size()), " "));
  REQUIRE_MESSAGE(shown.code == 0, shown.err);
  std::istringstream printed(shown.out);
  std::string heads, values;
  std::getline(printed, heads), std::getline(printed, values);
  const Words columns = cells_of(heads, "  "), row = cells_of(values, "  ");
  REQUIRE_MESSAGE(columns.size() == row.size(), shown.out);
  size_t compared = 0;
  while (std::getline(page, line) && !line.starts_with("## ")) {
    const Words cells = cells_of(line, "|");
    if (cells.size() != 3 || line.starts_with("|---")) continue;
    const auto at = std::find(columns.begin(), columns.end(), cells[0]);
    REQUIRE_MESSAGE(at != columns.end(), cells[0]);
    CHECK_MESSAGE(row[static_cast<size_t>(at - columns.begin())] == cells[2], cells[0]);
    ++compared;
  }
  CHECK(compared == 9);
}

TEST_CASE("the table of state in 16 bits in docs/performance.md is what the command above it prints") {
  std::istringstream page(read_text(std::string(kSourceDirectory) + "/docs/performance.md"));
  std::string line;
  while (std::getline(page, line) && line != "### Gradients and optimizer state in 16 bits") continue;
  const std::string begin = "    capstan show ";
  while (std::getline(page, line) && !line.starts_with(begin)) continue;
  REQUIRE(line.starts_with(begin));
  const Words command = cells_of(line.substr(std::string("    capstan ").size()), " ");
  const ScratchDirectory scratch;
  size_t compared = 0;
  while (std::getline(page, line) && !line.starts_with("###")) {
    const Words cells = cells_of(line, "|");
    if (cells.size() != 3 || cells[0] == "fields" || line.starts_with("|---")) continue;
    CAPTURE(line);
    Words words = command;
    if (cells[0] != "none")
      for (const std::string& field : cells_of(cells[0].substr(1, cells[0].size() - 2), " "))
        words.push_back(field);
    const Finished shown = run_in(scratch, words);
    REQUIRE_MESSAGE(shown.code == 0, shown.err);
    CHECK_MESSAGE(contains(shown.out, "largest: rank 0: " + cells[2] + ","), shown.out);
    ++compared;
  }
  CHECK(compared == 5);
}

TEST_CASE("the tables of layouts in the docs are what their commands print") {
  const ScratchDirectory scratch;
  const std::string docs = std::string(kSourceDirectory) + "/docs/";
  std::istringstream page(read_text(docs + "choosing-a-layout.md"));
  std::string line;
  const std::string begin = "    capstan show llama3-8b --ranks 8 --step ";
  while (std::getline(page, line) && !line.starts_with(begin)) continue;
  const Words command = cells_of(line.substr(std::string("    capstan ").size()), " ");
  size_t compared = 0;
  while (std::getline(page, line) && !line.starts_with("#")) {
    const Words cells = cells_of(line, "|");
    if (cells.size() != 3 || !cells[0].starts_with('`')) continue;
    Words words = command;
    for (const std::string& field : cells_of(cells[0].substr(1, cells[0].size() - 2), " "))
      words.push_back(field);
    const Finished shown = run_in(scratch, words);
    REQUIRE_MESSAGE(shown.code == 0, shown.err);
    CHECK_MESSAGE(contains(shown.out, "largest: rank 0: " + cells[1] + ", sends " + cells[2] + " ("), line);
    ++compared;
  }
  CHECK(compared == 9);

  const std::string printed = (std::filesystem::path(scratch.path()) / "table").string(),
                    script = "cd '" + std::string(kSourceDirectory) + "' && CAPSTAN='" +
                             std::string(kBinaryDirectory) + "/capstan' ";
  const std::string text = read_text(docs + "parallelism.md");
  const size_t at = text.find("bench/layouts.sh gpt2-124m");
  REQUIRE(at != std::string::npos);
  REQUIRE(std::system((script + text.substr(at, text.find('`', at) - at) + " >'" + printed + "'").c_str()) ==
          0);
  CHECK(contains(text, read_text(printed)));
}

TEST_CASE("the recipes fit the GPUs that they are made for") {
  // 80 GB are 74.5 GiB.
  const auto names = every_recipe();
  CHECK(names.size() >= 100);
  const ScratchDirectory scratch;
  for (const auto& name : names) {
    // All stages of these take a minute; by formula (tests/planner/memory.cpp) they stay far below the limit.
    if (name.starts_with("gpt-a100-") || name.starts_with("gpt-h100-")) continue;
    CAPTURE(name);
    CHECK(estimated_mib(scratch, {name}, {"--step", "train.device=cuda"}) <= 74.5 * 1024);
  }
}

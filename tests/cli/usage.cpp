// Help, flags, exit codes, and which stream says what.
#include <doctest/doctest.h>

#include <filesystem>
#include <regex>
#include <set>

#include "base/json.hpp"
#include "base/text.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;

static const std::vector<std::vector<std::string>> kCommands = {{"train"},
                                                                {"check"},
                                                                {"show"},
                                                                {"plan"},
                                                                {"explain"},
                                                                {"schema"},
                                                                {"recipe", "ls"},
                                                                {"recipe", "cp"},
                                                                {"recipe", "new"},
                                                                {"recipe", "fix"},
                                                                {"recipe", "trim"},
                                                                {"recipe", "import"},
                                                                {"data", "prepare"},
                                                                {"data", "inspect"},
                                                                {"tokenizer", "train"},
                                                                {"tokenizer", "encode"},
                                                                {"tokenizer", "decode"},
                                                                {"generate"},
                                                                {"eval"},
                                                                {"bench"},
                                                                {"trace"},
                                                                {"runs", "ls"},
                                                                {"runs", "show"},
                                                                {"runs", "plot"},
                                                                {"diff"},
                                                                {"sweep", "plan"},
                                                                {"sweep", "add"},
                                                                {"sweep", "run"},
                                                                {"sweep", "status"},
                                                                {"sweep", "retry"},
                                                                {"sweep", "table"},
                                                                {"sweep", "plot"},
                                                                {"sweep", "slurm"},
                                                                {"sweep", "ask"},
                                                                {"sweep", "tell"},
                                                                {"completion"},
                                                                {"help"},
                                                                {"version"}};

static std::vector<std::string> with(std::vector<std::string> words, const std::string& last) {
  words.push_back(last);
  return words;
}

static bool all_lines_fit(const std::string& text, size_t columns) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find('\n', at), text.size());
    size_t width = 0;
    for (size_t i = at; i < end; ++i) width += (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;
    if (width > columns) {
      MESSAGE(text.substr(at, end - at));
      return false;
    }
    at = end + 1;
  }
  return true;
}

TEST_CASE("help goes to standard output, the short one fits a small terminal") {
  for (const auto& command : kCommands) {
    CAPTURE(command.back());
    const Finished brief = run(with(command, "-h")), full = run(with(command, "--help"));
    CHECK(brief.code == 0);
    CHECK(brief.err.empty());
    CHECK(count_lines(brief.out) <= 24);
    CHECK(contains(brief.out, "usage: capstan " + command.front()));
    CHECK(contains(brief.out, "  capstan "));  // an example
    CHECK(brief.out.find("  capstan ") < brief.out.find("--help"));
    CHECK(full.code == 0);
    CHECK(full.err.empty());
    CHECK(contains(full.out, "--message-format"));
    CHECK(all_lines_fit(full.out, 130));
    CHECK(run({"help", command.front()}).code == 0);
  }
  CHECK(count_lines(run({"-h"}).out) <= 24);
  CHECK(count_lines(run({"data", "-h"}).out) <= 24);
  // Every way to shard a model that is served.
  for (const char* command : {"eval", "generate"})
    for (const char* axis : {"dist.tp", "dist.pp", "dist.ep"})
      CHECK(contains(run({command, "--help"}).out, axis));
}

TEST_CASE("help lists every command and topic, and shows the pages of docs/") {
  const Finished all = run({"help"});
  CHECK(all.code == 0);
  for (const auto& command : kCommands) CHECK(contains(all.out, "  " + command.front()));
  size_t pages = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(capstan::test::kSourceDirectory) + "/docs")) {
    const std::string topic = entry.path().stem().string();
    if (entry.path().extension() != ".md") continue;
    CAPTURE(topic);
    ++pages;
    CHECK(contains(all.out, "\n  " + topic + " "));
    const Finished page = run({"help", topic});
    CHECK(page.code == 0);
    // `data` is a group of commands too: the page follows.
    CHECK(page.out.ends_with(read_text(entry.path().string()).substr(2)));
    if (topic != "data") CHECK(page.out.size() == read_text(entry.path().string()).size() - 2);
  }
  CHECK(pages >= 15);
  const Finished unknown = run({"help", "overides"});
  CHECK(unknown.code == 2);
  CHECK(contains(unknown.err, "did you mean `overrides`"));
}

TEST_CASE("the pages of docs/reference/ are help topics, which `help reference` lists") {
  const Finished index = run({"help", "reference"});
  CHECK(contains(run({"help"}).out, "\n  reference "));
  size_t pages = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(capstan::test::kSourceDirectory) +
                                                               "/docs/reference")) {
    const std::string name = entry.path().stem().string();
    CAPTURE(name);
    ++pages;
    const Finished page = name == "README" ? index : run({"help", "reference/" + name});
    CHECK(page.code == 0);
    CHECK(page.out == read_text(entry.path().string()).substr(2));
    if (name != "README") CHECK(contains(index.out, "[" + name + "]"));
  }
  CHECK(pages >= 19);
  const Finished unknown = run({"help", "reference/optimiser"});
  CHECK(unknown.code == 2);
  CHECK(contains(unknown.err, "did you mean `reference/optimizer`"));
  CHECK(run({"help", "reference/"}).code == 2);
}

TEST_CASE("without arguments: short help on standard error, code 2") {
  const Finished none = run(std::vector<std::string>{});
  CHECK(none.code == 2);
  CHECK(none.out.empty());
  CHECK(count_lines(none.err) <= 24);
  const Finished group = run({"tokenizer"});
  CHECK(group.code == 2);
  CHECK(group.out.empty());
  CHECK(contains(group.err, "encode"));
}

TEST_CASE("unknown commands and flags: near names, all at once, code 2") {
  const Finished unknown_command = run({"tran", "quickstart"});
  CHECK(unknown_command.code == 2);
  CHECK(unknown_command.out.empty());
  CHECK(contains(unknown_command.err, "unknown command `tran`"));
  CHECK(contains(unknown_command.err, "`train`"));
  const Finished inner = run({"data", "prepair"});
  CHECK(inner.code == 2);
  CHECK(contains(inner.err, "`prepare`"));

  const Finished flags = run({"check", "quickstart", "--rank", "8", "--jsn", "-z"});
  CHECK(flags.code == 2);
  CHECK(contains(flags.err, "unknown flag `--rank`"));
  CHECK(contains(flags.err, "`--ranks`"));
  CHECK(contains(flags.err, "unknown flag `--jsn`"));
  CHECK(contains(flags.err, "`--json`"));
  CHECK(contains(flags.err, "unknown flag `-z`"));

  // An option that is given twice is refused, because one value would be ignored.
  const Finished twice = run({"train", "quickstart", "--run-dir", "a", "--run-dir", "b"});
  CHECK(twice.code == 2);
  CHECK_MESSAGE(contains(twice.err, "`--run-dir` is given twice: `a` and `b`"), twice.err);
  const Finished list = run({"tokenizer", "train", "x.txt", "--special", "<a>", "--special", "<b>"});
  CHECK(list.code == 2);
  CHECK_MESSAGE(contains(list.err, "one list: --special <a>,<b>"), list.err);
  CHECK(run({"check", "quickstart", "--ranks", "1", "--ranks", "1"}).code == 0);
  CHECK(run({"version", "--color", "never", "--color", "always"}).code == 0);

  // No guessing: a prefix is not the flag.
  CHECK(run({"train", "quickstart", "--res"}).code == 2);
  CHECK(run({"check", "quickstart", "--ranks"}).code == 2);
  CHECK(run({"check", "quickstart", "--ranks", "eight"}).code == 2);
  CHECK(run({"check", "quickstart", "--ranks", "0"}).code == 2);
  CHECK(run({"check", "quickstart", "--color", "green"}).code == 2);
  CHECK(run({"check", "quickstart", "--json=yes"}).code == 2);
  CHECK(run({"check"}).code == 2);
  CHECK(run({"generate"}).code == 2);
  CHECK(run({"version", "extra"}).code == 2);
}

TEST_CASE("misspelled names of every kind are answered with a near one") {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"explain", "train_iter"}, "`train.train_iters`"},
      {{"explain", "optimzer"}, "`optimizer`"},
      {{"explain", "R020"}, "`R02"},
      {{"explain", "global_batch_divisble"}, "`global_batch_divisible`"},
      {{"explain", "C0605x"}, "`C0605`"},
      {{"help", "tutorail"}, "`tutorial-own-text`"},
      {{"help", "multinode"}, "`multi-node`"},
      {{"schema", "optimzer"}, "`optimizer`"},
      {{"recipe", "ls", "modle"}, "`model`"},
      {{"recipe", "cp", "quickstrt", "x.yaml"}, "`quickstart`"},
      {{"show", "quickstart", "model.num_layrs"}, "`model.num_layers`"},
      {{"show", "quickstart", "--format", "ymal"}, "`yaml`"},
      {{"recipe", "import", "x", "--from", "megatorn"}, "`megatron`"},
      {{"data", "prepare", "x", "--documents", "blankline"}, "`blank-line`"},
      {{"completion", "bsh"}, "`bash`"},
      {{"convert", "ggfu:model.gguf", "out"}, "`gguf:model.gguf`"},
      {{"convert", "runs/a", "hff:out"}, "`hf:out`"}};
  for (const auto& [words, near] : cases) {
    const Finished wrong = run(words);
    CAPTURE(words.back());
    CHECK(wrong.code == 2);
    CHECK_MESSAGE(contains(wrong.err, near), wrong.err);
  }
}

TEST_CASE("bench refuses a name that no kernel has") {
  const Finished result = run({"bench", "atention", "--seconds", "0.01"});
  CHECK(result.code == 2);
  CHECK_MESSAGE(contains(result.err, "no kernel has `atention` in its name"), result.err);
  CHECK_MESSAGE(contains(result.err, "qkv forward"), result.err);
}

TEST_CASE("overrides in the notation of shells and other tools get a correction") {
  struct Case {
    std::vector<std::string> words;
    std::string said;
  };
  const Case cases[] = {
      {{"check", "quickstart", "--model.num_layers=4"}, "write `model.num_layers=4`"},
      {{"check", "quickstart", "--model.num_layers", "4"}, "write `model.num_layers=4`"},
      {{"check", "quickstart", "model.num_layers", "=", "4"}, "write `model.num_layers=4`"},
      {{"check", "quickstart", "model.num_layers=", "4"}, "4"},
      {{"check", "quickstart", "\u201cmodel.num_layers=4\u201d"}, "straight quotes"},
      {{"check", "quickstart", "model.num_layers"}, "write `model.num_layers=VALUE`"},
      {{"check", "quickstart", "num_layers"}, "section.field=value"},
      {{"check", "quickstart", std::string(capstan::test::kSourceDirectory) + "/recipes/quickstart.yaml"},
       "`@"},
      {{"check", "quickstart", "model.num_layer=4"}, "num_layers"},
      {{"runs", "ls", "--model.num_layers=4"}, "takes none"},
      {{"data", "prepare", "x.txt", "--tokenizer.kind=byte", "--output", "y"}, "`tokenizer.kind=byte`"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.words.back());
    const Finished result = run(c.words);
    CHECK(result.code != 0);
    CHECK(result.code <= 2);
    CHECK(result.out.empty());
    CHECK_MESSAGE(contains(result.err, c.said), result.err);
  }
  CHECK(
      run({"show", "quickstart", "model.num_layers", "model.num_layers=3", "--", "model.num_layers=5"}).out ==
      "5\n");
}

TEST_CASE("CAPSTAN_CPU limits the instruction set; unknown and absent ones are refused") {
  ScratchDirectory scratch;
  const auto train_on = [&](const std::string& level) {
    Launch launch;
    launch.arguments = train_tiny({"train.train_iters=2", "--run-dir", level});
    launch.environment = {"CAPSTAN_CPU=" + level};
    launch.directory = scratch.path();
    return run(launch);
  };
  const Finished oldest = train_on("sse4");
  CHECK(oldest.code == 0);
  CHECK_MESSAGE(contains(oldest.err, "1 rank x 1 thread, SSE4.2"), oldest.err);
  const Finished unknown = train_on("sse3");
  CHECK(unknown.code == 2);
  CHECK(contains(unknown.err, "environment variable CAPSTAN_CPU=sse3 is not an instruction set"));
  CHECK(contains(unknown.err, "sse4, avx2, avx512, amx"));
  const Finished tiles = train_on("amx");
  if (contains(read_text("/proc/cpuinfo"), " amx_tile ")) {
    CHECK(tiles.code == 0);
  } else {
    CHECK(tiles.code == 2);
    CHECK(contains(tiles.err, "CAPSTAN_CPU=amx: this machine has no AMX"));
    CHECK_FALSE(std::filesystem::exists(scratch.file("amx")));
  }
}

TEST_CASE("color only where it is wanted") {
  const std::vector<std::string> wrong = {"check", "quickstart", "model.num_layer=4"};
  const auto colored = [&](std::vector<std::string> words, std::vector<std::string> environment) {
    Launch launch;
    launch.arguments = std::move(words);
    launch.environment = std::move(environment);
    return contains(run(launch).err, "\x1b[");
  };
  CHECK_FALSE(colored(wrong, {}));  // not a terminal
  CHECK(colored(with(wrong, "--color=always"), {}));
  CHECK(colored(with(wrong, "--color=always"), {"NO_COLOR=1"}));
  CHECK(colored(wrong, {"CLICOLOR_FORCE=1"}));
  CHECK_FALSE(colored(wrong, {"CLICOLOR_FORCE=1", "NO_COLOR=1"}));
  CHECK_FALSE(colored(with(wrong, "--color=never"), {"CLICOLOR_FORCE=1"}));
}

TEST_CASE("messages for editors and programs") {
  const Finished brief = run({"check", "quickstart", "model.num_layer=4", "--message-format", "short"});
  CHECK(contains(brief.err, "<cli>:1"));
  CHECK(contains(brief.err, "error["));
  const Finished printed = run({"check", "quickstart", "model.num_layer=4", "--message-format=json"});
  CHECK(nlohmann::json::accept(printed.err));
  const Finished usage = run({"check", "--nope", "--message-format=json"});
  CHECK(usage.code == 2);
  REQUIRE(nlohmann::json::accept(usage.err));
  CHECK(capstan::json_of(usage.err)["exit_code"] == 2);
}

TEST_CASE("version") {
  CHECK(contains(run({"version"}).out, "capstan "));
  CHECK(run({"--version"}).out == run({"version"}).out);
  CHECK(capstan::json_of(run({"version", "--json"}).out)["schema"] == "capstan.version/1");
}

TEST_CASE("the help of an error names the flag that the library's text does not") {
  ScratchDirectory scratch;
  const std::string records = scratch.write("records.jsonl", "{\"text\": 1}\n");
  const Finished refused =
      run({"data", "prepare", records, "--tokenizer", "bytes", "--output", scratch.file("corpus")});
  CHECK(refused.code == 2);
  CHECK_MESSAGE(contains(refused.err, "help: --on-bad-line skip leaves such records out"), refused.err);
}

// The commands between backquotes in the texts of the program, without those that are put together from parts
// or hold a placeholder: "recipe ls".
static std::set<std::string> commands_in_texts() {
  std::set<std::string> commands;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(std::filesystem::path(kSourceDirectory) / "src")) {
    if (entry.path().extension() != ".cpp") continue;
    // Adjacent literals are one text.
    const std::string text =
        std::regex_replace(read_text(entry.path().string()), std::regex("\"\\s*\n\\s*\""), "");
    const std::regex command("`capstan ([^`\"\n]*)`");
    for (std::sregex_iterator at(text.begin(), text.end(), command), end; at != end; ++at)
      if (!std::regex_search((*at)[1].str(), std::regex("[A-Z]{4}|\\bN\\b|\u2026")))
        commands.insert((*at)[1].str());
  }
  return commands;
}

TEST_CASE("every command that a text of the program proposes exists, and answers as the text says") {
  const std::set<std::string> commands = commands_in_texts();
  CHECK(commands.size() > 30);
  CHECK(commands.count("explain") == 1);
  for (const std::string& command : commands) {
    std::vector<std::string> words;
    for (const std::string_view word : capstan::split(command, ' ')) words.emplace_back(word);
    // Those that need no further words run; of the others, the name and the flags are those of a command.
    const bool complete = command.starts_with("explain") || command.starts_with("help") ||
                          command.starts_with("recipe ls") || command == "runs ls" || command == "version";
    if (!complete && words.back() != "-h") words.emplace_back("--help");
    const Finished done = run(words);
    CHECK_MESSAGE(done.code == 0, "capstan " << command << ": " << done.err);
  }
}

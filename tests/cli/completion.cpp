// Completion: the answers word for word, the script in a real bash, and the time an answer takes.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <sstream>

#include "cases.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;

TEST_CASE("completion answers") {
  CHECK(run_cases("completion") >= 20);
}

namespace {

std::vector<std::string> answers(std::vector<std::string> words) {
  words.insert(words.begin(), "__complete");
  std::vector<std::string> texts;
  std::istringstream lines(run(words).out);
  for (std::string line; std::getline(lines, line);) texts.push_back(line.substr(0, line.find('\t')));
  return texts;
}

bool offers(const std::vector<std::string>& texts, const std::string& one) {
  return std::find(texts.begin(), texts.end(), one) != texts.end();
}

}  // namespace

TEST_CASE("every command, section and flag is offered, each with a description") {
  const auto commands = answers({""});
  const std::string help = run({"help"}).out;
  for (const auto& command : commands) CHECK_MESSAGE(contains(help, "  " + command), command);
  CHECK(offers(commands, "train"));
  CHECK(offers(commands, "recipe"));
  for (const auto& command : commands) {
    CAPTURE(command);
    CHECK(offers(answers({command, "--"}), "--help"));
  }
  std::istringstream lines(run({"__complete", "check", "quickstart", "model."}).out);
  size_t fields = 0;
  for (std::string line; std::getline(lines, line); ++fields) {
    CHECK(line.starts_with("model."));
    CHECK_MESSAGE(contains(line, "\t"), line);
  }
  CHECK(fields > 40);
  // Every field of a section can be reached by its letters.
  for (const auto& section : {"model", "optimizer", "dist"}) {
    const auto all = answers({"check", "quickstart", std::string(section) + "."});
    for (const auto& field : all)
      CHECK(offers(answers({"check", "quickstart", field.substr(0, field.size() - 1)}), field));
  }
}

TEST_CASE("odd words are answered with nothing, never with an error") {
  const std::vector<std::vector<std::string>> odd = {
      {},
      {"no-such-command", ""},
      {"data", "no-such-command", ""},
      {"check", "quickstart", "no.such.field="},
      {"check", "quickstart", "="},
      {"check", "quickstart", "~"},
      {"check", "quickstart", "model.num_layers[0].x="},
      {"check", "/no/such/directory/"},
      {"check", "\xff\xfe"},
      {"check", std::string(5000, 'x')},
      {"--", "--", "--"},
      {"train", "quickstart", "--run-dir"},
  };
  for (auto words : odd) {
    words.insert(words.begin(), "__complete");
    const Finished done = run(words);
    CHECK(done.code == 0);
    CHECK(done.err.empty());
  }
}

TEST_CASE("the scripts are printed, and no others") {
  CHECK(contains(run({"completion", "bash"}).out, "complete -F _capstan capstan"));
  CHECK(contains(run({"completion", "zsh"}).out, "#compdef capstan"));
  CHECK(contains(run({"completion", "fish"}).out, "complete -c capstan"));
  const Finished other = run({"completion", "tcsh"});
  CHECK(other.code == 2);
  CHECK(contains(other.err, "bash, zsh, fish"));
}

namespace {

// The replies of bash for `line`, typed up to its end and split at the characters at which bash splits words.
std::string bash_replies(const std::string& line, int type = 9) {
  ScratchDirectory scratch;
  const std::string script = scratch.write(
      "try.bash",
      "set -u\n"
      "PATH=" +
          std::string(capstan::test::kBinaryDirectory) +
          ":$PATH\n"
          "source <(capstan completion bash)\n"
          "COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=$2 COMP_WORDBREAKS=$' \\t\\n\"\\'@><=;|&(:'\n"
          "COMP_WORDS=() rest=$1 inside=0\n"
          "while [[ -n $rest ]]; do\n"
          "  case $rest in\n"
          "    ' '*) rest=${rest:1}; inside=0 ;;\n"
          "    [=:@]*) COMP_WORDS+=(\"${rest:0:1}\"); rest=${rest:1}; inside=0 ;;\n"
          "    *) if ((inside)); then COMP_WORDS[-1]+=${rest:0:1}; else COMP_WORDS+=(\"${rest:0:1}\"); fi\n"
          "       rest=${rest:1}; inside=1 ;;\n"
          "  esac\n"
          "done\n"
          "[[ $1 != *' ' ]] || COMP_WORDS+=('')\n"
          "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
          "_capstan\n"
          "((${#COMPREPLY[@]} == 0)) || printf '%s\\n' \"${COMPREPLY[@]}\"\n");
  const std::string command = "cd " + scratch.path() + " && touch 'with blank.yaml' plain.yaml && bash " +
                              script + " '" + line + "' " + std::to_string(type) + " 2>&1";
  std::string out;
  std::array<char, 4096> buffer;
  FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  while (const size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), got);
  ::pclose(pipe);
  return out;
}

}  // namespace

TEST_CASE("the bash script in a real bash") {
  CHECK(bash_replies("capstan che") == "check\n");
  CHECK(bash_replies("capstan recipe c") == "cp\n");
  CHECK(bash_replies("capstan check quicks") == "quickstart\nquickstart-lora\nquickstart-moe\n");
  CHECK(bash_replies("capstan check quickstart train.train_it") == "train.train_iters=\n");
  // Behind a `=` bash replaces only what follows it.
  CHECK(bash_replies("capstan check quickstart dist.sequence_parallel=") == "true\nfalse\n");
  CHECK(bash_replies("capstan check quickstart dist.sequence_parallel=t") == "true\n");
  CHECK(bash_replies("capstan check quickstart --color=a") == "auto\nalways\n");
  CHECK(bash_replies("capstan check quickstart --color a") == "auto\nalways\n");
  CHECK(bash_replies("capstan check quickstart @pl") == "plain.yaml\n");
  CHECK(bash_replies("capstan check ./w") == "./with\\ blank.yaml\n");
  CHECK(bash_replies("capstan check quickstart no.such").empty());
  // A list is shown with descriptions; what is put in never has one.
  CHECK(contains(bash_replies("capstan check quickstart mixed_precision=bf16", 63), "  "));
  CHECK(contains(bash_replies("capstan t", 63), "train      "));
  CHECK(bash_replies("capstan tr") == "train\ntrace\n");
}

#if CAPSTAN_TIMED
TEST_CASE("an answer takes less than 30 ms" * doctest::test_suite("timed")) {
  // Processor time, so that what else the machine does hardly counts.
  for (const std::vector<std::string>& words : {std::vector<std::string>{"__complete", ""},
                                                {"__complete", "check", ""},
                                                {"__complete", "check", "quickstart", "model."},
                                                {"__complete", "check", "quickstart", "mixed_precision="},
                                                {"__complete", "train", "llama3-8b", "dist.t"}}) {
    std::vector<double> times;
    for (int i = 0; i < 15; ++i) times.push_back(run(words).cpu_seconds);
    std::sort(times.begin(), times.end());
    MESSAGE(words.back() << ": " << 1e3 * times[7] << " ms");
    CHECK(times[7] < 0.030);
  }
}
#endif

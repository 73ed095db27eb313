// The actions that texts of the library propose have words without flags and words of the command line.
#include "base/actions.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>

#include "base/error.hpp"
#include "cli/report.hpp"

using namespace capstan;

TEST_CASE(
    "every action has plain words, which name no flag, and words of the command line, and no other has") {
  std::set<std::string_view> plain, flags;
  for (const Action& action : plain_action_words()) {
    CAPTURE(action.name);
    CHECK(plain.insert(action.name).second);
    CHECK(action.words.find("--") == action.words.npos);
    CHECK(plain_actions("{" + std::string(action.name) + "}") == action.words);
  }
  for (const Action& action : cli::action_flags()) {
    CAPTURE(action.name);
    CHECK(flags.insert(action.name).second);
    CHECK(!action.words.empty());
    CHECK(cli::with_flags("{" + std::string(action.name) + "}") == action.words);
  }
  CHECK(plain == flags);
}

TEST_CASE("the help of an error is plain for a program, and has flags on the command line") {
  const Error error(ErrorCode::failed, "run `a` exists already", "{resume}, or give {other_run_dir}");
  CHECK(error.help() == "resume it, or give another run directory");
  CHECK(std::string(error.what()).ends_with("help: resume it, or give another run directory"));
  CHECK(cli::with_flags(error.marked_help()) ==
        "resume it with --resume, or give another run directory with --run-dir DIR");
}

TEST_CASE("other text in braces stays") {
  for (const char* text :
       {"", "{", "}", "{}", "{resume", "dataset={kind: mock}", "${env:NAME}", "{Resume}"}) {
    CHECK(plain_actions(text) == text);
    CHECK(cli::with_flags(text) == text);
  }
  CHECK(plain_actions("{a {resume} b}") == "{a resume it b}");
  CHECK(plain_actions("{{resume}}") == "{resume it}");
}

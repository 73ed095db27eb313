// Evaluates the condition of an `if` or the pattern of a `case`, as far as the words of the script determine
// it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "importers/shell_words.hpp"

namespace capstan::importers {

enum class Truth : uint8_t { no, unknown, yes };

Truth negated(Truth truth);
Truth both(Truth a, Truth b);
Truth either(Truth a, Truth b);

// Evaluates a command of a condition: `[ … ]`, `[[ … ]]`, `test …`, `((…))`, `true`, `false`, each also after
// `!`. Returns Truth::unknown for all other commands, which would have to be executed, and for tests of
// files.
Truth truth_of(const ShellCommand& command);
// Whether `command` succeeds before `&&` and `||`: as truth_of(), and commands that prepare for those after
// them (`cd`, `echo`, `mkdir` …) succeed.
Truth success_of(const ShellCommand& command);
// Whether `command` is a test that truth_of() knows.
bool is_test(const ShellCommand& command);

// Whether a word matches a pattern of `case`.
Truth matches(const ShellWord& word, const ShellWord& pattern);

}  // namespace capstan::importers

// What the condition of an `if` or the pattern of a `case` comes to, as far as the words of the script say
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

// A command in a condition: `[ … ]`, `[[ … ]]`, `test …`, `true`, `false`, each also behind `!`. Everything
// else would have to be executed, and files are not looked at: unknown.
Truth truth_of(const ShellCommand& command);
bool is_test(const ShellCommand& command);  // one of these

// Whether a word matches a pattern of `case`.
Truth matches(const ShellWord& word, const ShellWord& pattern);

}  // namespace capstan::importers

// Resolves the recipe, the overrides and --ranks of a command line, and shows diagnostics on standard error.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/context.hpp"
#include "config/resolve/resolve.hpp"
#include "config/tools/shrink.hpp"

namespace capstan::text {
class Tokenizer;
}

namespace capstan::cli {

// Thrown to end a command with an exit code after its errors have been printed.
struct CommandExit {
  int code;
};

// Resolves the recipe; with --shrink the shrunk one, and `from` then holds the original. Errors in the recipe
// are in the result.
// Throws Error for a recipe that cannot be read.
config::Resolution resolve_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks = std::nullopt,
                                  config::ShrunkFrom* from = nullptr);

// Shows errors, warnings and notes in the format of --message-format; --quiet hides the notes.
void show_diagnostics(const Context& context, const config::Resolved& resolved);

// Resolves the recipe and shows its diagnostics; throws CommandExit{2} if it has errors.
config::Resolution require_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks = std::nullopt,
                                  config::ShrunkFrom* from = nullptr);

// Resolves the recipe with overrides after those of the command line, and shows nothing. nullopt: it has
// errors.
std::optional<config::Config> resolve_with(const Context& context, const std::string& recipe,
                                           std::optional<int64_t> ranks,
                                           const std::vector<std::string>& overrides);

// Resolves the recipe with mock data and no tokenizer, for `ranks` ranks, to measure its steps; throws
// CommandExit{2} if it has errors. shows: shows them.
config::Resolution recipe_for_measuring(const Context& context, const std::string& recipe, int64_t ranks = 1,
                                        bool shows = true);

// With --shrink: a short description of the shrunk size; and all changes, one field on each line.
std::string shrunk_summary(const config::ShrunkFrom& from, const config::Resolution& small);
std::string shrunk_changes(const config::ShrunkFrom& from, const config::Resolution& small);
// Formats a layout, as in "16 ranks, tp 2, pp 2, cp 2, dp 2".
std::string layout_text(const config::DistConfig& dist);

// Value of --ranks.
std::optional<int64_t> ranks_argument(const Context& context);

// Value of `extends` in the recipe file `to` for a base that the command line names: the name of a recipe, or
// a file relative to the directory of `to`. `to` empty: the current directory.
std::string extends_text(const std::string& base, const std::string& to);

// Writes a new file. Throws ErrorCode::usage if it exists.
void write_new(const std::filesystem::path& path, const std::string& text);

// Throws ErrorCode::usage if the file exists and does not begin with `beginning` (in lower case), with which
// every output of the command begins: it may be an input that was named by mistake.
void refuse_other_content(const std::filesystem::path& file, std::string_view beginning);

struct NamedTokenizer {
  // Name as the user gave it.
  std::string name;
  std::shared_ptr<const text::Tokenizer> tokenizer;
};
// Opens the tokenizer of --tokenizer FILE, or that of --recipe. Throws ErrorCode::usage if neither is given.
NamedTokenizer tokenizer_argument(const Context& context);

}  // namespace capstan::cli

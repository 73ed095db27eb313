// Recipe, overrides and --ranks of a command line, resolved; what is wrong with them shown on standard error.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cli/context.hpp"
#include "config/resolve.hpp"

namespace capstan::cli {

// A verb that has already said what is wrong ends with this code.
struct Exit {
  int code;
};

// Errors in the recipe are in the result. Throws Error for a recipe that cannot be read.
config::Resolution resolve_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks = std::nullopt);

// Errors, warnings and notes in the form that was asked for; --quiet leaves the notes out.
void show_diagnostics(const Context& context, const config::Resolved& resolved);

// Both; throws Exit{2} where the recipe has errors.
config::Resolution require_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks = std::nullopt);

std::optional<int64_t> ranks_argument(const Context& context);  // --ranks

// Writes a new file; ErrorCode::usage where the name is taken.
void write_new(const std::filesystem::path& path, const std::string& text);

// --tokenizer FILE, or the tokenizer of --recipe. ErrorCode::usage without either.
std::string tokenizer_argument(const Context& context);

}  // namespace capstan::cli

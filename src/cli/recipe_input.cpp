#include "cli/recipe_input.hpp"

#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "cli/terminal.hpp"

namespace capstan::cli {

config::Resolution resolve_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks) {
  config::Request request;
  request.recipe = recipe;
  request.overrides = context.args.overrides();
  request.ranks = ranks;
  if (ranks && !context.args.has("ranks")) request.ranks_origin = "this launch";
  return config::resolve(request);
}

void show_diagnostics(const Context& context, const config::Resolved& resolved) {
  std::vector<config::Diagnostic> shown;
  for (const config::Diagnostic& diagnostic : resolved.diagnostics)
    if (!context.quiet() || diagnostic.level != config::Level::note) shown.push_back(diagnostic);
  if (shown.empty()) return;
  config::RenderOptions options;
  options.color = context.color_err;
  options.format = context.messages == MessageFormat::json      ? config::DiagnosticFormat::json
                   : context.messages == MessageFormat::compact ? config::DiagnosticFormat::compact
                                                                : config::DiagnosticFormat::human;
  std::string text = config::render(shown, resolved.sources, options);
  if (!text.ends_with('\n')) text += '\n';
  say(text);
}

config::Resolution require_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks) {
  config::Resolution resolution = resolve_recipe(context, recipe, ranks);
  show_diagnostics(context, resolution);
  if (!resolution.ok()) throw Exit{exit_code_of(ErrorCode::config)};
  return resolution;
}

std::optional<int64_t> ranks_argument(const Context& context) {
  return context.args.integer("ranks", 1, 1 << 24);
}

void write_new(const std::filesystem::path& path, const std::string& text) {
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, ignored)))
    fail(ErrorCode::usage, "`" + path.string() + "` exists already",
         "choose another name, or remove it first");
  if (path.has_parent_path() && !std::filesystem::is_directory(path.parent_path()))
    fail(ErrorCode::not_found, "there is no directory `" + path.parent_path().string() + "`");
  write_file_durably(path, text);
}

std::string tokenizer_argument(const Context& context) {
  const auto file = context.args.value("tokenizer");
  const auto recipe = context.args.value("recipe");
  if (file && recipe) fail(ErrorCode::usage, "`--tokenizer` and `--recipe` exclude each other");
  if (file && !context.args.overrides().empty())
    fail(ErrorCode::usage,
         "the override `" + context.args.overrides().front().text + "` changes a recipe, and none is given",
         "name one with --recipe; a file of this name is written ./" + context.args.overrides().front().text);
  if (file) return *file;
  if (!recipe)
    fail(ErrorCode::usage, "`--tokenizer` is missing",
         "name a tokenizer.json, the word `bytes`, or with --recipe the recipe that names one");
  const config::Resolution resolution = require_recipe(context, *recipe);
  const config::TokenizerConfig& tokenizer = resolution.config.tokenizer;
  if (tokenizer.tokenizer_type == config::TokenizerKind::byte) return "bytes";
  if (tokenizer.tokenizer_model) return tokenizer.tokenizer_model->resolved;
  if (tokenizer.vocab_file)
    return std::filesystem::path(tokenizer.vocab_file->resolved).parent_path().string();
  fail(ErrorCode::config, "the recipe `" + *recipe + "` names no tokenizer",
       "tokenizer.tokenizer_model=FILE names one");
}

}  // namespace capstan::cli

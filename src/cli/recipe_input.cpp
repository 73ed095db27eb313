#include "cli/recipe_input.hpp"

#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/terminal.hpp"
#include "config/tools/show.hpp"
#include "train/setup/tokenizer.hpp"

namespace capstan::cli {

// The origin of the values that shrink() changes.
constexpr const char* kShrinkOption = "--shrink";

config::Resolution resolve_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks, config::ShrunkFrom* from) {
  config::Request request;
  request.recipe = recipe;
  request.overrides = context.args.overrides();
  request.ranks = ranks;
  request.ranks_origin = context.args.has("ranks")  ? "--ranks"
                         : context.args.has("gpus") ? "--gpus"
                                                    : "this launch";
  if (!context.args.has("shrink")) return config::resolve(request);
  request.imposed_by = kShrinkOption;
  return config::resolve_shrunk(request, from);
}

std::optional<config::Config> resolve_with(const Context& context, const std::string& recipe,
                                           std::optional<int64_t> ranks,
                                           const std::vector<std::string>& overrides) {
  config::Request request;
  request.recipe = recipe;
  request.overrides = context.args.overrides();
  for (const std::string& one : overrides) request.overrides.push_back(config::Override::token(one));
  request.ranks = ranks;
  config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) return std::nullopt;
  return std::move(resolution.config);
}

std::string layout_text(const config::DistConfig& dist) {
  std::string text = counted(dist.world_size, "rank");
  const auto axis = [&](const char* name, int64_t size) {
    if (size > 1) text += std::string(", ") + name + " " + std::to_string(size);
  };
  axis("tp", dist.tensor_model_parallel_size);
  axis("pp", dist.pipeline_model_parallel_size);
  axis("cp", dist.context_parallel_size);
  axis("ep", dist.expert_model_parallel_size);
  axis("dp", dist.data_parallel_size.value_or(1));
  return text;
}

std::string shrunk_summary(const config::ShrunkFrom& from, const config::Resolution& small) {
  const config::Config& c = small.config;
  std::string text = "shrunk to " + counted(c.model.num_layers, "layer") + " of width " +
                     std::to_string(c.model.hidden_size) + ", " + std::to_string(c.model.seq_length) +
                     " tokens a sample, " + counted(c.train.train_iters.value_or(0), "step");
  if (from.layout) text += "; its kind of layout takes " + layout_text(*from.layout);
  return text;
}

std::string shrunk_changes(const config::ShrunkFrom& from, const config::Resolution& small) {
  std::string text;
  for (const config::Change& change : config::diff(from.full, small))
    if (change.after_origin == kShrinkOption)
      text += "  " + change.path + ": " + change.before + " -> " + change.after + "\n";
  return text;
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
  print_stderr(text);
}

config::Resolution require_recipe(const Context& context, const std::string& recipe,
                                  std::optional<int64_t> ranks, config::ShrunkFrom* from) {
  config::Resolution resolution = resolve_recipe(context, recipe, ranks, from);
  show_diagnostics(context, resolution);
  if (!resolution.ok()) throw CommandExit{exit_code_of(ErrorCode::config)};
  return resolution;
}

config::Resolution recipe_for_measuring(const Context& context, const std::string& recipe, int64_t ranks,
                                        bool shows) {
  config::Request request;
  request.recipe = recipe;
  request.overrides = {config::Override::token("dataset=mock"), config::Override::token("tokenizer=none")};
  const auto& given = context.args.overrides();
  request.overrides.insert(request.overrides.end(), given.begin(), given.end());
  request.ranks = ranks;
  config::Resolution resolution = config::resolve(request);
  if (resolution.ok()) return resolution;
  if (shows) show_diagnostics(context, resolution);
  throw CommandExit{2};
}

std::optional<int64_t> ranks_argument(const Context& context) {
  return context.args.integer("ranks", 1, 1 << 24);
}

std::string extends_text(const std::string& base, const std::string& to) {
  namespace fs = std::filesystem;
  std::error_code unknown;
  if (config::Library::standard().recipe(base) || !fs::exists(base, unknown)) return base;
  const fs::path directory = fs::absolute(to.empty() ? "recipe.yaml" : to).lexically_normal().parent_path();
  const std::string text = fs::absolute(base).lexically_normal().lexically_relative(directory).string();
  return text.find('/') == std::string::npos ? "./" + text : text;
}

void write_new(const std::filesystem::path& path, const std::string& text) {
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, ignored)))
    fail(ErrorCode::usage, "`" + path.string() + "` exists already",
         "choose another name, or remove it first");
  if (path.has_parent_path() && !std::filesystem::is_directory(path.parent_path()))
    fail_not_found("directory", path.parent_path().string(),
                   "the directory in which the file is written has to exist");
  write_file_durably(path, text);
}

void refuse_other_content(const std::filesystem::path& file, std::string_view beginning) {
  if (file.empty()) fail(ErrorCode::usage, "the name of an output file is empty");
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(file, unknown)) return;
  std::string head(beginning.size(), '\0');
  std::ifstream in(file, std::ios::binary);
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<size_t>(in.gcount()));
  if (head.empty() || lower_case(head) == beginning) return;
  fail(ErrorCode::usage, "`" + file.string() + "` exists and is not an output of this command",
       "choose another name, or remove it first");
}

NamedTokenizer tokenizer_argument(const Context& context) {
  const auto file = context.args.value("tokenizer");
  const auto recipe = context.args.value("recipe");
  if (file && recipe) fail(ErrorCode::usage, "`--tokenizer` and `--recipe` exclude each other");
  if (file && !context.args.overrides().empty())
    fail(ErrorCode::usage,
         "the override `" + context.args.overrides().front().text + "` changes a recipe, and none is given",
         "name one with --recipe; a file of this name is written ./" + context.args.overrides().front().text);
  if (file) return {*file, train::load_tokenizer_files(*file)};
  if (!recipe)
    fail(ErrorCode::usage, "`--tokenizer` is missing",
         "name a tokenizer.json, the word `bytes`, or with --recipe the recipe that names one");
  const config::Resolution resolution = require_recipe(context, *recipe);
  const config::TokenizerConfig& tokenizer = resolution.config.tokenizer;
  if (tokenizer.tokenizer_type == config::TokenizerKind::none)
    fail(ErrorCode::config, "the recipe `" + *recipe + "` names no tokenizer",
         "tokenizer.tokenizer_model=FILE names one");
  return {train::tokenizer_name(tokenizer), train::load_tokenizer(resolution.config)};
}

}  // namespace capstan::cli

// capstan diff
#include <filesystem>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "config/tools/show.hpp"
#include "train/inference/compare.hpp"

namespace capstan::cli {

namespace {

OrderedJson as_json(const std::vector<config::Change>& changes) {
  auto json = OrderedJson::array();
  for (const auto& c : changes)
    json.push_back({{"path", c.path},
                    {"effect", config::enum_name(c.effect)},
                    {"a", c.before},
                    {"b", c.after},
                    {"a_origin", c.before_origin},
                    {"b_origin", c.after_origin}});
  return json;
}

OrderedJson as_json(const train::Comparison& c) {
  OrderedJson json = {
      {"schema", "capstan.diff/1"},   {"same_numbers", c.same_numbers()}, {"steps", c.steps},
      {"steps_only_a", c.only_a},     {"steps_only_b", c.only_b},         {"not_compared", c.not_compared},
      {"checkpoints", c.checkpoints}, {"recipe", as_json(c.recipe)},      {"tensors", OrderedJson::array()}};
  if (c.first_number)
    json["first_step"] = {{"step", c.first_number->step},
                          {"name", c.first_number->name},
                          {"a", c.first_number->a},
                          {"b", c.first_number->b}};
  if (c.checkpoint_step) json["checkpoint_step"] = *c.checkpoint_step;
  for (const auto& t : c.tensors)
    json["tensors"].push_back({{"name", t.name},
                               {"problem", t.problem},
                               {"elements", t.elements},
                               {"first", t.first},
                               {"a", t.a},
                               {"b", t.b},
                               {"largest", t.largest}});
  return json;
}

void put_human(const train::Comparison& c) {
  if (!c.recipe.empty()) put(config::render_diff(c.recipe) + "\n");
  if (c.first_number)
    put("step " + std::to_string(c.first_number->step) +
        " is the first logged one that differs: " + c.first_number->name + " " + to_text(c.first_number->a) +
        " against " + to_text(c.first_number->b) + "\n");
  else if (c.steps > 0)
    put(std::to_string(c.steps) + " logged steps have the same numbers\n");
  if (c.only_a > 0) put(std::to_string(c.only_a) + " logged steps are only in the first\n");
  if (c.only_b > 0) put(std::to_string(c.only_b) + " logged steps are only in the second\n");
  if (c.checkpoint_step) {
    const auto& t = c.tensors.front();
    put("checkpoint of step " + std::to_string(*c.checkpoint_step) + " is the first that differs, in " +
        std::to_string(c.tensors.size()) + (c.tensors.size() == 1 ? " tensor: " : " tensors, first ") +
        t.name + ": " +
        (t.problem.empty()
             ? std::to_string(t.elements) + " elements, the first at " + std::to_string(t.first) + ": " +
                   to_text(t.a) + " against " + to_text(t.b) + "; at most " + to_text(t.largest) + " apart"
             : t.problem) +
        "\n");
  } else if (c.checkpoints > 0) {
    put(std::to_string(c.checkpoints) + (c.checkpoints == 1 ? " checkpoint is" : " checkpoints are") +
        " equal bit by bit\n");
  }
  for (const std::string& reason : c.not_compared) put("not compared: " + reason + "\n");
  if (c.checkpoints == 0 && c.steps > 0) put("no checkpoint in common: parameters are not compared\n");
  if (c.steps == 0 && c.checkpoints == 0) put("they have no step and no checkpoint in common\n");
}

// A recipe, or the one that a run or checkpoint keeps.
config::Resolution recipe_of(const Context& context, const std::string& name, bool stored) {
  config::Request request;
  request.recipe = stored ? train::stored_recipe_file(name).string() : name;
  try {
    config::Resolution resolution = config::resolve(request);
    if (resolution.ok()) return resolution;
    show_diagnostics(context, resolution);
    throw CommandExit{exit_code_of(ErrorCode::config)};
  } catch (const Error& error) {
    const bool directory = std::filesystem::is_directory(name);
    if (stored || (error.code() != ErrorCode::not_found && !directory)) throw;
    // A trial of a sweep has its recipe in its directory.
    const std::string inside = name + "/recipe.yaml";
    if (!directory) {
      const std::string near =
          near_paths_help(near_runs(name, "runs", [](const std::filesystem::path&) { return true; }));
      fail(ErrorCode::not_found, not_found_text("recipe, run or checkpoint", name),
           near.empty() ? error.marked_help() : near);
    }
    fail(ErrorCode::not_found, "`" + name + "` is not a recipe, run or checkpoint",
         directory && std::filesystem::exists(inside) ? "a recipe is in it: `" + inside + "`"
                                                      : error.marked_help());
  }
}

int diff_recipes(const Context& context, const std::string& a, bool a_stored, const std::string& b,
                 bool b_stored) {
  const config::Resolution first = recipe_of(context, a, a_stored), second = recipe_of(context, b, b_stored);
  const auto changes = config::diff(first, second);
  if (context.args.has("json"))
    put(dump_json(
            OrderedJson{
                {"schema", "capstan.diff/1"}, {"same_recipe", changes.empty()}, {"recipe", as_json(changes)}},
            2) +
        "\n");
  else
    put(changes.empty() ? "the recipes are equal\n" : config::render_diff(changes));
  return changes.empty() ? 0 : 1;
}

int run_diff(Context& context) {
  const Arguments& args = context.args;
  const std::string &a = args.word(0, "A"), &b = args.word(1, "B");
  const bool a_stored = train::is_stored(a), b_stored = train::is_stored(b);
  if (!a_stored || !b_stored) return diff_recipes(context, a, a_stored, b, b_stored);
  const train::Comparison comparison = train::compare(a, b);
  if (args.has("json"))
    put(dump_json(as_json(comparison), 2) + "\n");
  else
    put_human(comparison);
  return !comparison.same_numbers() ? 1 : comparison.not_compared.empty() ? 0 : 2;
}

}  // namespace

const Command kDiff = {
    .name = "diff",
    .purpose = "compare two recipes, runs or checkpoints",
    .usage = "A B [--json]",
    .examples = {{"diff llama3-8b my.yaml", "fields that differ, by effect: numerics, speed, memory, output"},
                 {"diff my.yaml runs/a", "a recipe and what a run was started with"},
                 {"diff runs/a runs/b", "their recipes, losses and common checkpoints"},
                 {"diff runs/a/checkpoints/step-00000100 runs/b", "two checkpoints"}},
    .options = {{"json", 0, "", "print one JSON object"}},
    .details =
        "A and B are recipes (names or files), runs and checkpoints, in any mix. Where one of them is a "
        "recipe, the\n"
        "resolved recipes are compared field by field: code 1 where they differ. Two runs or checkpoints are "
        "compared\n"
        "by their numbers, bit by bit, times excepted: code 1 where numbers differ, 2 where something could "
        "not be\n"
        "compared. Differences between their recipes are shown, and do not change the code.\n",
    .max_words = 2,
    .run = run_diff,
};

}  // namespace capstan::cli

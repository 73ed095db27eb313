// capstan diff
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "train/compare.hpp"

namespace capstan::cli {

namespace {

nlohmann::ordered_json as_json(const train::Comparison& c) {
  nlohmann::ordered_json json = {{"schema", "capstan.diff/1"},
                                 {"same_numbers", c.same_numbers()},
                                 {"steps", c.steps},
                                 {"steps_only_a", c.only_a},
                                 {"steps_only_b", c.only_b},
                                 {"not_compared", c.not_compared},
                                 {"checkpoints", c.checkpoints},
                                 {"recipe", nlohmann::ordered_json::array()},
                                 {"tensors", nlohmann::ordered_json::array()}};
  for (const auto& r : c.recipe)
    json["recipe"].push_back({{"path", r.path}, {"effect", r.effect}, {"a", r.a}, {"b", r.b}});
  if (c.first_number)
    json["first_step"] = {{"step", c.first_number->step},
                          {"name", c.first_number->name},
                          {"a", c.first_number->a},
                          {"b", c.first_number->b}};
  if (c.checkpoint_step) json["checkpoint_step"] = *c.checkpoint_step;
  for (const auto& t : c.tensors)
    json["tensors"].push_back({{"name", t.name},
                               {"problem", t.problem},
                               {"cells", t.cells},
                               {"first", t.first},
                               {"a", t.a},
                               {"b", t.b},
                               {"largest", t.largest}});
  return json;
}

void put_human(const train::Comparison& c) {
  for (const auto& r : c.recipe)
    put("recipe  " + r.path + ": " + r.a + " -> " + r.b + "  (" + r.effect + ")\n");
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
             ? std::to_string(t.cells) + " cells, the first at " + std::to_string(t.first) + ": " +
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

int run_diff(Context& context) {
  const Arguments& args = context.args;
  const train::Comparison comparison = train::compare(args.word(0, "A"), args.word(1, "B"));
  if (args.has("json"))
    put(as_json(comparison).dump(2) + "\n");
  else
    put_human(comparison);
  return !comparison.same_numbers() ? 1 : comparison.not_compared.empty() ? 0 : 2;
}

}  // namespace

const Verb kDiff = {
    .name = "diff",
    .purpose = "where two runs or checkpoints part: recipe, first step, first tensor",
    .usage = "A B [--json]",
    .examples = {{"diff runs/a runs/b", "their recipes, losses and common checkpoints"},
                 {"diff runs/a/checkpoints/step-00000100 runs/b", "two checkpoints"}},
    .options = {{"json", 0, "", "as one JSON object"}},
    .details =
        "Numbers are compared bit by bit; times are not compared. Code 1 where numbers differ, 2 where\n"
        "something could not be compared.\n",
    .max_words = 2,
    .run = run_diff,
};

}  // namespace capstan::cli

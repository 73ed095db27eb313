#include "base/actions.hpp"

#include <algorithm>

namespace capstan {

namespace {

constexpr Action kPlainWords[] = {
    // runs
    {"resume", "resume it"},
    {"resume_elsewhere", "resume the run"},
    {"resume_at_step_0", "resume from step 0"},
    {"start", "start it without resuming"},
    {"other_run_dir", "another run directory"},
    {"list_runs", ""},
    {"force", "the run can be started all the same"},
    // models and adapters
    {"convert_base_to", "convert the base to"},
    {"name_base", "name the base of the adapters"},
    {"as_model", "as the model in place of the base"},
    {"gguf_types", "the types bf16 and f32 can"},
    {"merge_adapters", "merge them instead"},
    // data
    {"prepare_again", "prepare the text again"},
    {"append_eod", "prepare the text again with the token appended"},
    {"overwrite", "allow it to be replaced"},
    {"skip_bad_lines", "such records can be left out and counted"},
    // sweeps
    {"plan_sweep", "plan the sweep first"},
    {"other_sweep_dir", "another sweep directory"},
    // recipes and their import
    {"recipe_list", "the recipe library"},
    {"show_and_diff", "programs that show and compare recipes"},
    {"new_recipe_from", "begin a recipe from"},
    {"name_format", "give its format:"},
    {"extend_recipe", "extend a recipe"},
    {"variable", ""},
    {"launch_ranks", "`capstan train` or mpirun starts the ranks"},
    {"resume_run", "a run here is resumed from its own checkpoints"},
    {"resume_existing", "an existing run is resumed, never overwritten"},
    {"run_dir_name", "the run directory has the recipe's name, or the one given to the run"},
};

}  // namespace

std::span<const Action> plain_action_words() {
  return kPlainWords;
}

std::string expand_actions(std::string_view text, std::span<const Action> words) {
  std::string result;
  for (;;) {
    const size_t begin = text.find('{'), end = begin == text.npos ? begin : text.find('}', begin);
    if (end == text.npos) return result.append(text);
    const std::string_view name = text.substr(begin + 1, end - begin - 1);
    const auto found = std::ranges::find(words, name, &Action::name);
    // Text in other braces may hold a marker: "${env:{x".
    const size_t next = found == words.end() ? begin + 1 : end + 1;
    result.append(text.substr(0, found == words.end() ? next : begin));
    if (found != words.end()) result.append(found->words);
    text.remove_prefix(next);
  }
}

std::string plain_actions(std::string_view text) {
  return expand_actions(text, kPlainWords);
}

}  // namespace capstan

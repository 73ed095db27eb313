#include "cli/sweep_text.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "cli/terminal.hpp"

namespace capstan::cli {

// kShownInvalid: of the trials that are invalid for one reason.
constexpr size_t kShownReasons = 10, kShownInvalid = 4;

std::string metric_text(const std::optional<double>& value) {
  std::array<char, 48> text;
  if (!value) return "-";
  std::snprintf(text.data(), text.size(), "%.5g", *value);
  return text.data();
}

std::string step_count_text(std::optional<int64_t> steps) {
  return steps ? std::to_string(*steps) : "?";
}

OrderedJson invalid_json(const sweep::Plan& plan) {
  OrderedJson all = OrderedJson::array();
  for (const sweep::InvalidTrial& one : plan.invalid)
    all.push_back({{"values", sweep::text_of(one.values, one.seed)}, {"reasons", one.reasons}});
  return all;
}

void show_invalid(const sweep::Plan& plan) {
  std::vector<std::vector<const sweep::InvalidTrial*>> groups;
  for (const sweep::InvalidTrial& one : plan.invalid) {
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const auto& group) { return group[0]->reasons == one.reasons; });
    (same == groups.end() ? groups.emplace_back() : *same).push_back(&one);
  }
  for (size_t i = 0; i < std::min(groups.size(), kShownReasons); ++i) {
    const auto& group = groups[i];
    const size_t shown = group.size() > kShownInvalid + 1 ? kShownInvalid : group.size();
    for (size_t k = 0; k < shown; ++k)
      put("invalid: " + sweep::text_of(group[k]->values, group[k]->seed) + "\n");
    if (shown < group.size())
      put("invalid: " + std::to_string(group.size() - shown) + " more for the same reason\n");
    for (const std::string& reason : group[0]->reasons) put("    " + reason + "\n");
  }
  if (groups.size() > kShownReasons)
    put("and " + std::to_string(groups.size() - kShownReasons) +
        " more reasons; --json and plan.json have them all\n");
}

std::vector<std::string> trial_ids(const sweep::Plan& plan, const std::vector<std::string>& words) {
  std::vector<std::string> ids;
  for (const std::string& word : words) {
    const sweep::TrialPlan* trial = plan.find(word);
    if (!trial && word.size() >= 8) {
      const size_t before = ids.size();
      for (const sweep::TrialPlan& one : plan.trials)
        if (one.configuration == word) ids.push_back(one.id);
      if (ids.size() > before) continue;
    }
    if (!trial) plan.fail_no_trial(word);
    ids.push_back(trial->id);
  }
  return ids;
}

}  // namespace capstan::cli

// The recipe of a run: its unsupported features, the record that a run keeps of it, and its changes at a
// resume.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// ErrorCode::unsupported with every field whose value this version cannot train.
void refuse_missing_features(const config::Config& config);
// refuse_missing_features() for an estimate, which needs neither the recipe's device nor its communication
// library.
void refuse_missing_estimates(const config::Config& config);

// overrides: those that the resolution was made with. command: one line.
RecipeRecord recipe_record(const config::Resolution& resolution, std::span<const config::Override> overrides,
                           std::string command);

// The recipe in a checkpoint, resolved. ErrorCode::format where it does not resolve.
config::Config stored_config(const std::string& text);

// The fields in which `now` differs from the recipe stored with a checkpoint.
std::vector<RecipeChange> changes_since(const std::string& stored, const config::Resolution& now);

}  // namespace capstan::train

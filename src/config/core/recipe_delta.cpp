#include "config/core/recipe_delta.hpp"

#include <algorithm>

#include "config/core/composer.hpp"
#include "config/core/external.hpp"

namespace capstan::config {

namespace {

std::string shown_preset(const SectionInfo& section, const Choice& choice, const Composition& composed) {
  if (!choice.location.known() || !(is_external_model(section.name, choice.preset) || is_path(choice.preset)))
    return choice.preset;
  const std::string& from = composed.sources[static_cast<size_t>(choice.location.source)].directory;
  return relative_name(choice.preset, absolute_name(choice.preset, from), composed.sources.front().directory);
}

std::string own_choice(const SectionInfo& section, const void* root, const Composition& composed) {
  const auto& choices = composed.choices[section.index];
  // The choice in effect without the recipe's own choices.
  const Choice* base = nullptr;
  for (const Choice& choice : choices)
    if (composed.layers[choice.layer].base) base = &choice;
  const bool base_on = (base && !base->off) ||
                       std::any_of(composed.writes.begin(), composed.writes.end(), [&](const Write& write) {
                         return write.field->section_index == section.index &&
                                composed.layers[write.layer].precedence != Layer::Precedence::preset &&
                                in_base(composed, write);
                       });
  if (section.optional && !section.at(root)) return base_on ? "null" : "";
  const Choice* choice = choices.empty() ? nullptr : &choices.back();
  if (choice && !choice->preset.empty())
    return base && base->preset == choice->preset ? "" : shown_preset(section, *choice, composed);
  return section.optional && !base_on ? "{}" : "";
}

}  // namespace

bool in_base(const Composition& composed, const Write& write) {
  const Layer& layer = composed.layers[write.layer];
  if (layer.precedence == Layer::Precedence::preset) return !write.dead;
  if (!layer.base) return false;
  return !write.dead || write.dead_by == Write::kRequested || !composed.layers[write.dead_by].base;
}

std::map<std::string, std::string> own_choices(const Schema& schema, const void* root,
                                               const Composition& composed) {
  std::map<std::string, std::string> own;
  for (const auto& section : schema.sections())
    if (const std::string text = own_choice(section, root, composed); !text.empty()) own[section.name] = text;
  return own;
}

}  // namespace capstan::config

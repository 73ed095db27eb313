#include <algorithm>
#include <set>
#include <utility>

#include "base/text.hpp"
#include "config/core/composer.hpp"

namespace capstan::config {

Diagnostic unknown_key(const Schema& schema, const std::string& section, const std::string& key,
                       SourceLocation location, bool suggest) {
  Diagnostic diagnostic;
  diagnostic.code = "C0102";
  diagnostic.location = location;
  const SectionInfo* known = section.empty() ? nullptr : schema.find_section(section);
  diagnostic.message = "unknown key `" + (section.empty() ? "" : section + ".") + shortened(key) + "`";
  diagnostic.label = known             ? "not a field of `" + section + "`"
                     : section.empty() ? "not a section"
                                       : "`" + section + "` is not a section";

  if (!suggest) return diagnostic;
  size_t offered = 0;
  const auto offer = [&](std::string text, const std::string& replacement) {
    if (offered++ < 3) diagnostic.help(std::move(text));
    if (offered == 1 && !replacement.empty()) diagnostic.replace(location, replacement);
    // With several suggestions, none can be applied automatically.
    if (offered > 1) {
      for (auto& suggestion : diagnostic.suggestions) suggestion.machine_applicable = false;
      diagnostic.path.clear();
    }
  };
  const auto offer_field = [&](std::string text, const FieldInfo& field) {
    if (offered == 0) diagnostic.path = field.path;
    offer(std::move(text), field.section == section ? field.name : "");
  };
  if (section.empty() && (key == "extends" || key == "schema" || key == "unset" || key == "models")) {
    diagnostic.label = "a line of a recipe file, not a field";
    diagnostic.help(key == "extends"
                        ? "to read one more file write `@file`; another recipe is the first argument"
                    : key == "unset" ? "to reset a field write `~section.field`"
                                     : "leave it out");
    return diagnostic;
  }
  if (!key.empty() && key.find_first_not_of("0123456789") == std::string::npos) {
    diagnostic.help("a comma begins another entry: numbers have a decimal point, as in 0.001");
    return diagnostic;
  }
  // The same name in another section, or the name that another tool gives it.
  for (const FieldInfo* field : schema.fields())
    if (field->name == key && field->section != section)
      offer_field("a field with that name exists: `" + field->path + "`", *field);
  // If the key is the name of a field, aliases in other sections are not suggested.
  const bool exact = offered > 0;
  for (const FieldInfo* field : schema.fields()) {
    if (field->name == key || (exact && field->section != section)) continue;
    if (std::find(field->known_as.begin(), field->known_as.end(), key) != field->known_as.end())
      offer_field("it is called `" + field->path + "` here", *field);
    else if (field->section != section &&
             std::find(field->aliases.begin(), field->aliases.end(), key) != field->aliases.end())
      offer_field("a field with that name exists: `" + field->path + "`", *field);
  }
  if (offered == 0 && known) {
    std::vector<std::string> names;
    for (const auto& field : known->fields) {
      names.push_back(field.name);
      for (const auto& alias : field.aliases)
        if (alias.find('.') == std::string::npos) names.push_back(alias);
    }
    std::set<const FieldInfo*> seen;
    for (const auto& near : near_matches(key, names, 6)) {
      const FieldInfo* field = schema.find_spelling(section + "." + near);
      if (!seen.insert(field).second) continue;
      const std::string is =
          field->path == section + "." + near ? "" : " (an alias of `" + field->path + "`)";
      offer("a field with a similar name exists: `" + section + "." + near + "`" + is, near);
    }
  }
  if (offered == 0 && !known) {
    std::vector<std::string> names;
    for (const auto& candidate : schema.sections())
      if (!candidate.name.empty()) names.push_back(candidate.name);
    for (const auto& field : schema.sections())
      if (field.name.empty())
        for (const auto& top : field.fields) names.push_back(top.name);
    for (const auto& near : near_matches(section.empty() ? key : section, names))
      offer("a section with a similar name exists: `" + near + "`", section.empty() ? near : "");
  }
  if (offered == 0) {
    std::vector<std::string> names;
    std::vector<const FieldInfo*> fields;
    for (const FieldInfo* field : schema.fields()) names.push_back(field->name);
    for (const auto& near : near_matches(key, names))
      for (const FieldInfo* field : schema.fields())
        if (field->name == near) {
          offer("a field with a similar name exists: `" + field->path + "`", "");
          break;
        }
  }
  if (offered == 0)
    diagnostic.help(known ? "`capstan explain " + section + "` lists the fields of the section"
                          : "`capstan explain` lists the sections");
  return diagnostic;
}

}  // namespace capstan::config

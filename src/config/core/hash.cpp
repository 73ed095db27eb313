#include "config/core/hash.hpp"

#include <xxhash.h>

#include <algorithm>
#include <vector>

#include "base/text.hpp"
#include "config/core/emit.hpp"

namespace capstan::config {

// Makes paths absolute, so that the hash does not depend on the directory of the recipe.
static void make_absolute(Value& value) {
  if (!value.resolved.empty()) value.text = value.resolved;
  for (auto& item : value.items) make_absolute(item);
}

std::string canonical_form(const Schema& schema, const void* root, HashScope scope) {
  return canonical_form(schema, root, [&](const FieldInfo& field) {
    return scope == HashScope::full || field.effect == Effect::math;
  });
}

std::string canonical_form(const Schema& schema, const void* root,
                           FunctionRef<bool(const FieldInfo&)> counts) {
  std::vector<const FieldInfo*> fields = schema.fields();
  std::sort(fields.begin(), fields.end(),
            [](const FieldInfo* a, const FieldInfo* b) { return a->path < b->path; });
  std::string out;
  for (const FieldInfo* field : fields) {
    if (field->type->kind == Type::Kind::secret || field->section.empty()) continue;
    if (!counts(*field)) continue;
    if (!schema.sections()[field->section_index].at(root)) continue;
    Value value = schema.load(root, *field);
    make_absolute(value);
    out += field->path + " = " + json(*field->type, value) + "\n";
  }
  return out;
}

std::string config_hash(const Schema& schema, const void* root, HashScope scope) {
  return hash_of(canonical_form(schema, root, scope));
}

std::string hash_of(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return hex(hash.high64) + hex(hash.low64);
}

}  // namespace capstan::config

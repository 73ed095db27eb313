// "The same configuration", decidable across machines: a canonical text of all fields, and its hash.
#pragma once

#include <string>
#include <string_view>

#include "base/function_ref.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

enum class HashScope : unsigned char { math, full };  // math: only fields with Effect::math
// One line "path = json" for each field, in the order of the paths; fields of a section that is switched off
// are left out. Secrets and the recipe's name and description never count.
std::string canonical_form(const Schema& schema, const void* root, HashScope scope = HashScope::full);
std::string canonical_form(const Schema& schema, const void* root,
                           FunctionRef<bool(const FieldInfo&)> counts);
// 32 hex digits.
std::string config_hash(const Schema& schema, const void* root, HashScope scope = HashScope::math);
std::string hash_of(std::string_view canonical);  // of a canonical form: likewise

}  // namespace capstan::config

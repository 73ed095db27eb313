// "The same configuration", decidable across machines: a canonical text of all leaves, and its hash.
#pragma once

#include <string>
#include <string_view>

#include "base/function_ref.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

enum class HashScope : unsigned char { math, full };  // math: only leaves with Effect::math
// One line "path = json" for each leaf, in the order of the paths; leaves of a section that is switched off are left out.
// Secrets and the recipe's name and description never count.
std::string canonical_form(const Schema& schema, const void* root, HashScope scope = HashScope::full);
std::string canonical_form(const Schema& schema, const void* root,
                           FunctionRef<bool(const FieldInfo&)> counts);
std::string config_hash(const Schema& schema, const void* root,
                        HashScope scope = HashScope::math);  // 32 hex digits
std::string hash_of(std::string_view canonical);             // of a canonical form: likewise

}  // namespace capstan::config

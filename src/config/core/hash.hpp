// "The same configuration", decidable across machines: a canonical text of all fields, and its hash.
#pragma once

#include <string>
#include <string_view>

#include "base/function_ref.hpp"
#include "config/core/field.hpp"

namespace capstan::config {

// math: only fields with Effect::math count.
enum class HashScope : unsigned char { math, full };
// Returns one line "path = json" for each field, in the order of the paths. Fields of a section that is
// switched off are left out. Secrets and the recipe's name and description are never included.
std::string canonical_form(const Schema& schema, const void* root, HashScope scope = HashScope::full);
std::string canonical_form(const Schema& schema, const void* root,
                           FunctionRef<bool(const FieldInfo&)> counts);
// Returns the hash of a configuration as 32 hexadecimal digits.
std::string config_hash(const Schema& schema, const void* root, HashScope scope = HashScope::math);
// Returns the hash of a canonical form as 32 hexadecimal digits.
std::string hash_of(std::string_view canonical);

}  // namespace capstan::config

// Shared by the rule files: the definition of a rule, and texts of operands and nearest legal values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

// The rules of one file, in the order in which they are written. RULE adds to it.
class RuleList {
 public:
  using Check = void (*)(const Config& config, RuleReport& report);
  bool add(RuleInfo info, Check check) {
    for (std::string& path : info.reads)
      if (path.starts_with('?')) info.optional_reads.push_back(path.erase(0, 1));
    rules_.emplace_back(std::move(info), check);
    return true;
  }
  void add_to(Schema& schema) const {
    for (const auto& [info, check] : rules_) schema.rule<Config>(info, check);
  }

 private:
  std::vector<std::pair<RuleInfo, Check>> rules_;
};

// RULES_OF_FILE(world_rules) defines the function of sections.hpp that returns the rules of this file.
#define RULES_OF_FILE(rules_of_topic) \
  RuleList& rules_of_topic() {        \
    static RuleList rules;            \
    return rules;                     \
  }                                   \
  constexpr auto file_rules = rules_of_topic;

// RULE("R0201", name, "the rule in one sentence", paths that it reads...) { body that reads `c` and writes to
// `report` } defines a rule and adds it to the rules of the file. A path with a "?" before it is one of
// RuleInfo::optional_reads.
#define RULE(code, name, doc, ...)                                                                          \
  void name(const Config& c, RuleReport& report);                                                           \
  [[maybe_unused]] const bool name##_added = file_rules().add({code, #name, doc, {__VA_ARGS__}, {}}, name); \
  void name(const Config& c, RuleReport& report)

// Numbers in texts: both kinds under one name, because std::to_string() writes 1e-4 as 0.000100.
using capstan::to_text;
std::string to_text(int64_t value);

// Formats a product, as in "8 * 4 * 2 = 64".
std::string product_text(const std::vector<int64_t>& factors);
// Returns the product, or nullopt if it does not fit 64 bits.
std::optional<int64_t> product_of(const std::vector<int64_t>& factors);

// Formats the multiples of `step` around `value`, from 1 * step: "960 or 1024", or only one of them.
std::string nearest_multiples(int64_t value, int64_t step);
// Formats the divisors of `total` that are nearest to `value`, as in "4 or 8".
std::string nearest_divisors(int64_t value, int64_t total);

// Number of virtual pipeline stages; 1 if it is unset.
int64_t virtual_stages(const Config& c);
// Whether the type is bf16 or fp16.
bool is_16_bit(Precision precision);
// Whether parameters, gradients or optimizer state are sharded over data-parallel ranks.
bool shards(const Config& c);

}  // namespace capstan::config

// What the rule files share: the definition of a rule, and texts of operands and nearest legal values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/sections/sections.hpp"

namespace capstan::config {

// The rules of one file, in the order in which they are written; filled by RULE.
class RuleList {
 public:
  using Check = void (*)(const Config& config, RuleReport& report);
  bool add(RuleInfo info, Check check) {
    rules_.emplace_back(std::move(info), check);
    return true;
  }
  void add_to(Schema& schema) const {
    for (const auto& [info, check] : rules_) schema.rule<Config>(info, check);
  }

 private:
  std::vector<std::pair<RuleInfo, Check>> rules_;
};

// RULE("R0201", name, "the rule in one sentence", paths that it reads...) { body that reads `c` and writes to
// `report` } defines a rule and adds it to file_rules(), which the file declares.
#define RULE(code, name, doc, ...)                                                                      \
  void name(const Config& c, RuleReport& report);                                                       \
  [[maybe_unused]] const bool name##_added = file_rules().add({code, #name, doc, {__VA_ARGS__}}, name); \
  void name(const Config& c, RuleReport& report)

std::string text_of(int64_t value);
std::string text_of(double value);

// "8 * 4 * 2 = 64"
std::string product_text(const std::vector<int64_t>& factors);
// The product, or nothing when it does not fit 64 bits.
std::optional<int64_t> product_of(const std::vector<int64_t>& factors);

// The multiples of `step` around `value`, from 1 * step: "960 or 1024", or one of them.
std::string nearest_multiples(int64_t value, int64_t step);
// The divisors of `total` nearest to `value`: "4 or 8".
std::string nearest_divisors(int64_t value, int64_t total);

int64_t virtual_stages(const Config& c);  // VPP, 1 when unset
bool is_half(Precision precision);        // bf16 or fp16
bool shards(const Config& c);             // anything is split over data-parallel ranks

}  // namespace capstan::config

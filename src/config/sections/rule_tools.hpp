// What the rule files share: how operands and nearest legal values are put into words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/sections/sections.hpp"

namespace capstan::config {

std::string text_of(int64_t value);
std::string text_of(double value);

// "8 * 4 * 2 = 64"
std::string product_text(const std::vector<int64_t>& factors);
// The product, or nothing when it does not fit 64 bits.
std::optional<int64_t> product_of(const std::vector<int64_t>& factors);

// The multiples of `step` around `value`, from 1 * step: "960 or 1024", or one of them.
std::string nearest_multiples(int64_t value, int64_t step);
// The divisors of `whole` nearest to `value`: "4 or 8".
std::string nearest_divisors(int64_t value, int64_t whole);

int64_t virtual_stages(const Config& c);  // VPP, 1 when unset
bool is_half(Precision precision);        // bf16 or fp16
bool shards(const Config& c);             // anything is split over data-parallel ranks

}  // namespace capstan::config

#include "config/sections/rule_tools.hpp"

#include "base/checked.hpp"

namespace capstan::config {

std::string to_text(int64_t value) {
  return std::to_string(value);
}

std::string product_text(const std::vector<int64_t>& factors) {
  std::string text;
  for (const int64_t factor : factors) text += (text.empty() ? "" : " * ") + to_text(factor);
  if (const auto product = product_of(factors); product && factors.size() > 1)
    text += " = " + to_text(*product);
  return text;
}

std::optional<int64_t> product_of(const std::vector<int64_t>& factors) {
  std::optional<int64_t> product = 1;
  for (const int64_t factor : factors)
    if (product) product = try_mul(*product, factor);
  return product;
}

std::string nearest_multiples(int64_t value, int64_t step) {
  const int64_t below = value / step * step;
  const auto above = try_add(below, step);
  if (below == 0) return to_text(step);
  if (!above) return to_text(below);
  return to_text(below) + " or " + to_text(*above);
}

std::string nearest_divisors(int64_t value, int64_t total) {
  int64_t below = 0, above = 0;
  const auto consider = [&](int64_t divisor) {
    if (divisor <= value && divisor > below) below = divisor;
    if (divisor >= value && (above == 0 || divisor < above)) above = divisor;
  };
  for (int64_t d = 1; d <= 65536 && d <= total / d; ++d) {
    if (total % d != 0) continue;
    consider(d);
    consider(total / d);
  }
  if (below == 0) return to_text(above);
  if (above == 0 || above == below) return to_text(below);
  return to_text(below) + " or " + to_text(above);
}

int64_t virtual_stages(const Config& c) {
  return c.dist.virtual_pipeline_model_parallel_size.value_or(1);
}
bool is_16_bit(Precision precision) {
  return precision != Precision::fp32;
}
bool shards(const Config& c) {
  return c.ddp.data_parallel_sharding_strategy != ShardingStrategy::no_shard;
}

}  // namespace capstan::config

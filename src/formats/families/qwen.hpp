// Shared by Qwen 2 and Qwen 3. Included only by .cpp files.
#pragma once

#include "formats/family.hpp"

namespace capstan::formats {

// With `use_sliding_window`, layers from `max_window_layers` on have the window.
inline void read_qwen_windows(ConfigJson& c, config::ModelConfig& m) {
  const bool uses = c.boolean("use_sliding_window", false);
  const std::optional<int64_t> window = read_window(c, 4096);
  const auto& given = c.value("max_window_layers");
  if (!uses) {
    c.changes_nothing({"layer_types"});
    return;
  }
  const Json first = c.missing("max_window_layers") ? Json(28) : given;
  if (!first.is_number_integer() || first < 0 || first > (1 << 20))
    return c.refuse("`max_window_layers` is not a number of layers");
  std::vector<std::string> types = c.texts("layer_types");
  if (types.empty())
    for (int64_t layer = 0; layer < m.num_layers; ++layer)
      types.emplace_back(window && layer >= first.get<int64_t>() ? "sliding_attention" : "full_attention");
  read_layer_types(c, m, window, std::move(types));
}

inline void write_qwen_windows(const config::ModelConfig& m, OrderedJson& j) {
  j["use_sliding_window"] = m.window_size.has_value();
  j["sliding_window"] = or_null(m.window_size);
  j["max_window_layers"] = m.window_size ? 0 : m.num_layers;
  write_layer_types(m, j);
}

}  // namespace capstan::formats

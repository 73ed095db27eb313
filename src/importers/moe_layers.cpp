// Megatron's moe_layer_freq: an integer, or a list with 1 for the layers with experts, which its options give
// as a Python expression: "([0]*3+[1]*58)".
#include <algorithm>

#include "base/text.hpp"
#include "config/core/list_expression.hpp"
#include "config/sections/moe_layers.hpp"
#include "importers/rule.hpp"

namespace capstan::importers {

namespace {

std::string text_of(const config::Node& value) {
  if (value.kind == config::Node::Kind::scalar) return value.text;
  std::vector<std::string> items;
  for (const config::Node& item : value.items) items.push_back(item.text);
  return "[" + join(items, ",") + "]";
}

config::Node node_of(const std::vector<int64_t>& values) {
  config::Node list;
  list.kind = config::Node::Kind::list;
  for (const int64_t value : values) list.items.push_back(config::Node::scalar(std::to_string(value), {}));
  return values.size() == 1 ? list.items[0] : list;
}

}  // namespace

void take_moe_layers(Reader& reader, const SourceItem& item) {
  const config::Node& value = *item.value;
  const std::string text = text_of(value);
  const bool is_list = text.find('[') != std::string::npos;
  if (!is_list) {
    reader.draft.set_if_other("model.moe_layer_freq", value, item.from);
    return;
  }
  const auto layers = config::parse_list_expression(text);
  if (!layers || std::ranges::any_of(*layers, [](int64_t one) { return one > 1; }))
    return reader.draft.omit(item.from, value, OmissionReason::to_fill_in,
                             "a list of layers: see model.moe_layer_freq");
  const config::MoeLayerPattern pattern = config::moe_layer_pattern(*layers);
  const std::vector<int64_t>& freq = pattern.layer_freq.items;
  if (freq == std::vector<int64_t>{1} && pattern.first_dense == 0)
    return reader.draft.omit(item.from, value, OmissionReason::off, "every layer has experts");
  if (freq != std::vector<int64_t>{1}) reader.draft.set("model.moe_layer_freq", node_of(freq), item.from);
  if (pattern.first_dense > 0)
    reader.draft.set("model.moe_first_dense_layers", std::to_string(pattern.first_dense), item.from);
}

}  // namespace capstan::importers

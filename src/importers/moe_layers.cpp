// Megatron's moe_layer_freq: an integer, or a list with 1 for the layers with experts, which its options give
// as a Python expression: "([0]*3+[1]*58)".
#include <algorithm>
#include <cctype>

#include "base/text.hpp"
#include "config/sections/moe_layers.hpp"
#include "importers/rule.hpp"

namespace capstan::importers {

namespace {

constexpr size_t kMaxLayers = 1 << 13;

// Reads lists of 0 and 1, their multiples and their sums.
class LayerList {
 public:
  explicit LayerList(std::string_view text) : text_(text) {}
  std::optional<std::vector<int64_t>> parse() {
    std::vector<int64_t> layers;
    if (!sum(layers) || (skip_spaces(), at_ != text_.size())) return std::nullopt;
    return layers;
  }

 private:
  bool sum(std::vector<int64_t>& layers) {
    do {
      std::vector<int64_t> part;
      if (!product(part) || layers.size() + part.size() > kMaxLayers) return false;
      layers.insert(layers.end(), part.begin(), part.end());
    } while (take('+'));
    return true;
  }
  bool product(std::vector<int64_t>& layers) {
    if (take('(')) {
      if (++parentheses_ > 8 || !sum(layers) || !take(')')) return false;
    } else if (!list(layers)) {
      return false;
    }
    while (take('*')) {
      const auto times = number();
      if (!times || layers.size() * *times > kMaxLayers) return false;
      const std::vector<int64_t> once = std::move(layers);
      layers.clear();
      for (size_t i = 0; i < *times; ++i) layers.insert(layers.end(), once.begin(), once.end());
    }
    return true;
  }
  bool list(std::vector<int64_t>& layers) {
    if (!take('[')) return false;
    while (!take(']')) {
      const auto value = number();
      if (!value || *value > 1) return false;
      layers.push_back(static_cast<int64_t>(*value));
      if (!take(',') && peek() != ']') return false;
    }
    return true;
  }
  std::optional<size_t> number() {
    if (!std::isdigit(static_cast<unsigned char>(peek()))) return std::nullopt;
    size_t value = 0;
    while (std::isdigit(static_cast<unsigned char>(peek_here())))
      if ((value = 10 * value + static_cast<size_t>(text_[at_++] - '0')) > kMaxLayers) return std::nullopt;
    return value;
  }
  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  char peek_here() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char peek() {
    skip_spaces();
    return peek_here();
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  // Parentheses so far.
  int parentheses_ = 0;
};

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
  const auto layers = LayerList(text).parse();
  if (!layers)
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

#include "importers/rule.hpp"

#include <algorithm>
#include <span>

#include "base/text.hpp"
#include "config/core/convert.hpp"

namespace capstan::importers {

using config::Node;

std::vector<Rule> one_rule_per_key(std::span<const Rule> table) {
  std::vector<Rule> result;
  for (const Rule& rule : table)
    for (const std::string_view key : split(rule.key, ' ')) result.emplace_back(rule).key = key;
  return result;
}

const Rule* find_rule(std::span<const Rule> table, std::string_view key) {
  const Rule* best = nullptr;
  for (const Rule& rule : table) {
    if (rule.key == key) return &rule;
    if (!rule.key.ends_with('*')) continue;
    const std::string_view stem = rule.key.substr(0, rule.key.size() - 1);
    if (key.starts_with(stem) && (!best || best->key.size() < rule.key.size())) best = &rule;
  }
  return best;
}

std::optional<bool> truth(std::string_view text) {
  const std::string lower = lower_case(text);
  if (lower == "true" || lower == "yes" || lower == "on" || lower == "1") return true;
  if (lower == "false" || lower == "no" || lower == "off" || lower == "0") return false;
  return std::nullopt;
}

bool is_off(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return true;
    case Node::Kind::scalar:
      return node.text.empty() || (!node.quoted && truth(node.text) == false);
    default:
      return node.items.empty();
  }
}

void Reader::apply_rule(const Rule& rule, const SourceItem& item) {
  const Node& value = *item.value;
  if (rule.kind == Rule::Kind::deferred) return;
  if (rule.kind == Rule::Kind::omit) {
    draft.omit(item.from, value, is_off(value) ? OmissionReason::off : rule.why, std::string(rule.text));
    return;
  }
  if (value.kind == Node::Kind::null) {
    draft.omit(item.from, value, OmissionReason::off, "null");
    return;
  }
  switch (rule.kind) {
    case Rule::Kind::copy:
      draft.set(rule.path, value, item.from);
      return;
    case Rule::Kind::translate: {
      std::vector<std::string> words;
      for (const auto pair : split(rule.text, ' ')) {
        const auto equals = pair.find('=');
        const auto theirs = pair.substr(0, equals);
        if (value.kind == Node::Kind::scalar && value.text == theirs) {
          draft.set(rule.path, std::string(pair.substr(equals + 1)), item.from);
          return;
        }
        words.emplace_back(theirs);
      }
      draft.omit(item.from, value, OmissionReason::value, "counterparts are known for: " + join(words, ", "));
      return;
    }
    case Rule::Kind::set_if_present:
      if (value.kind == Node::Kind::scalar && truth(value.text) == true)
        draft.set(rule.path, std::string(rule.text), item.from);
      else
        draft.omit(item.from, value, is_off(value) ? OmissionReason::off : OmissionReason::value,
                   is_off(value) ? "" : "neither true nor false");
      return;
    case Rule::Kind::negate:
      if (const auto on = value.kind == Node::Kind::scalar ? truth(value.text) : std::nullopt)
        draft.set(rule.path, *on ? "false" : "true", item.from);
      else
        draft.omit(item.from, value, OmissionReason::value, "neither true nor false");
      return;
    case Rule::Kind::call:
      rule.function(*this, item);
      return;
    default:
      return;
  }
}

namespace {

// Whether the words differ by one inserted, missing or wrong letter, or by two swapped letters.
bool one_slip(std::string_view a, std::string_view b) {
  while (!a.empty() && !b.empty() && a.front() == b.front()) a.remove_prefix(1), b.remove_prefix(1);
  while (!a.empty() && !b.empty() && a.back() == b.back()) a.remove_suffix(1), b.remove_suffix(1);
  if (a.size() == 2 && b.size() == 2) return a[0] == b[1] && a[1] == b[0];
  return a.size() <= 1 && b.size() <= 1;
}

}  // namespace

// Whether a key that only a rule with `*` matches differs by one typing error from a key with its own rule.
bool Reader::misspelled(const Rule& rule, const SourceItem& item) const {
  if (!rule.key.ends_with('*')) return false;
  return std::any_of(
             table.begin(), table.end(),
             [&](const Rule& other) { return !other.key.ends_with('*') && one_slip(item.key, other.key); }) ||
         std::any_of(also_known.begin(), also_known.end(),
                     [&](const std::string& other) { return one_slip(item.key, other); });
}

void Reader::unknown(const SourceItem& item) {
  std::vector<std::string> names = also_known;
  // For example `peft: null`, if the table has peft.dim.
  bool section = false;
  for (const Rule& rule : table) {
    if (!rule.key.ends_with('*') && std::find(names.begin(), names.end(), rule.key) == names.end())
      names.emplace_back(rule.key);
    section = section || rule.key.starts_with(item.key + ".");
  }
  std::vector<std::string> near;
  if (++unknown_ <= kMaxLookedUp) near = near_matches(item.key, names, 3);
  if (is_off(*item.value) && (near.empty() || section))
    draft.omit(item.from, *item.value, OmissionReason::off, "");
  else
    draft.omit(item.from, *item.value, OmissionReason::unknown, "no counterpart is known", std::move(near));
}

void Reader::visit(const Node& node, const std::string& prefix,
                   bool (*otherwise)(Reader&, const SourceItem&)) {
  for (size_t i = 0; i < node.items.size(); ++i) {
    const SourceItem item{
        prefix + node.keys[i], {prefix + node.keys[i], node.key_locations[i]}, &node.items[i]};
    const Rule* rule = find_rule(table, item.key);
    const bool is_value = item.value->kind != Node::Kind::map || item.value->items.empty();
    const bool section = !is_value && std::any_of(table.begin(), table.end(), [&](const Rule& other) {
      return other.key.starts_with(item.key + ".");
    });
    if (rule && misspelled(*rule, item)) {
      unknown(item);
    } else if (rule && (!section || rule->kind != Rule::Kind::deferred)) {
      apply_rule(*rule, item);
    } else if (otherwise && otherwise(*this, item)) {
      // taken
    } else if (!is_value) {
      visit(*item.value, item.key + ".", otherwise);
    } else {
      unknown(item);
    }
  }
}

void Reader::apply(bool (*otherwise)(Reader&, const SourceItem&)) {
  visit(root, {}, otherwise);
}

void Reader::account() {
  for (const Rule& rule : table) {
    const Node* node = rule.kind == Rule::Kind::deferred ? find(rule.key) : nullptr;
    if (!node || draft.mentions(rule.key)) continue;
    // The keys below it have been processed.
    if (node->kind == Node::Kind::map && !node->items.empty()) continue;
    draft.omit(from(rule.key), *node, is_off(*node) ? OmissionReason::off : OmissionReason::no_effect,
               "given by other keys");
  }
}

const Node* Reader::find(std::string_view key) const {
  const Node* node = &root;
  if (const Node* found = node->find(key)) return found;
  while (true) {
    const auto dot = key.find('.');
    node = node->find(key.substr(0, dot));
    if (!node || dot == std::string_view::npos) return node;
    key.remove_prefix(dot + 1);
  }
}

SourceKey Reader::from(std::string_view key) const {
  const Node* node = &root;
  std::string_view rest = key;
  while (true) {
    const auto found = std::find(node->keys.begin(), node->keys.end(), rest);
    if (found != node->keys.end())
      return {std::string(key), node->key_locations[static_cast<size_t>(found - node->keys.begin())]};
    const auto dot = rest.find('.');
    if (dot == std::string_view::npos) return {std::string(key), {}};
    node = node->find(rest.substr(0, dot));
    if (!node) return {std::string(key), {}};
    rest.remove_prefix(dot + 1);
  }
}

bool Reader::given(std::string_view key) const {
  const Node* node = find(key);
  return node && node->kind != Node::Kind::null;
}

std::optional<std::string> Reader::text(std::string_view key) const {
  const Node* node = find(key);
  if (!node || node->kind == Node::Kind::null) return std::nullopt;
  if (node->kind == Node::Kind::scalar) return node->text;
  draft.omit(from(key), *node, OmissionReason::value, "a single value is expected");
  return std::nullopt;
}

std::optional<int64_t> Reader::integer(std::string_view key) const {
  const auto value = text(key);
  if (!value) return std::nullopt;
  config::TextProblem problem;
  const auto number = config::integer_from_text(*value, config::NumberForm::plain, problem);
  if (!number) draft.omit(from(key), *find(key), OmissionReason::value, "not an integer");
  return number;
}

std::optional<double> Reader::real(std::string_view key) const {
  const auto value = text(key);
  if (!value) return std::nullopt;
  const auto number = parse_double(*value);
  if (!number) draft.omit(from(key), *find(key), OmissionReason::value, "not a number");
  return number;
}

std::optional<bool> Reader::boolean(std::string_view key) const {
  const auto value = text(key);
  if (!value) return std::nullopt;
  const auto on = truth(*value);
  if (!on) draft.omit(from(key), *find(key), OmissionReason::value, "neither true nor false");
  return on;
}

bool take_seed(Reader& reader, std::string_view key) {
  const auto seed = reader.text(key);
  if (!seed) return false;
  for (const char* path : {"rng.seed", "dataset.random_seed"}) reader.set(path, *seed, key);
  return true;
}

void take_tf32(Reader& reader, bool computes_in_fp32) {
  if (computes_in_fp32)
    reader.copy("mixed_precision.tf32", "tf32");
  else if (reader.is_true("tf32"))
    reader.omit("tf32", OmissionReason::no_effect, "GEMMs are in 16 bits");
}

// The load-balancing losses that the draft has: texts of a recipe, "aux_loss" or "[aux_loss, seq_aux_loss]".
static std::vector<std::string> balancing_types(const Draft& draft) {
  std::string text = draft.text("model.moe_router_load_balancing_type");
  if (text.empty()) return {std::string(enum_name(config::RouterBalancing::aux_loss))};
  std::erase_if(text, [](char c) { return c == '[' || c == ']' || c == ' '; });
  const auto names = split(text, ',');
  return {names.begin(), names.end()};
}

void take_balance_coefficients(Reader& reader, std::string_view key,
                               std::optional<int64_t> data_parallel_size) {
  const char* path = "model.moe_aux_loss_coeff";
  if (!reader.given(key)) return;
  Node given = *reader.find(key);
  const auto coefficients =
      given.kind == Node::Kind::list ? std::span(given.items) : std::span(&given, size_t{1});
  const std::vector<std::string> types = balancing_types(reader.draft);
  if (coefficients.size() != types.size()) {
    reader.omit(key, OmissionReason::value,
                "not one coefficient for each load-balancing loss: " + join(types, ", "));
    return;
  }
  const auto at = static_cast<size_t>(std::ranges::find(types, "global_aux_loss") - types.begin());
  if (at == types.size() || data_parallel_size.value_or(1) == 1) {
    reader.draft.set_if_other(path, given, reader.from(key));
    if (at < types.size() && !data_parallel_size)
      reader.draft.list_as_assumed(
          path, "for one data-parallel rank; divide it by their number, as Megatron divides global_aux_loss");
    return;
  }
  if (const auto coefficient = parse_double(coefficients[at].text))
    coefficients[at].text = to_text(*coefficient / static_cast<double>(*data_parallel_size));
  reader.set(path, given, key,
             "divided by the data-parallel size " + std::to_string(*data_parallel_size) +
                 ", as Megatron divides global_aux_loss");
}

bool Reader::copy(std::string_view path, std::string_view key, const std::string& note) {
  if (!given(key)) return false;
  draft.set(path, *find(key), from(key), note);
  return true;
}
void Reader::set(std::string_view path, const Node& value, std::string_view key, const std::string& note) {
  draft.set(path, value, from(key), note);
}
void Reader::set(std::string_view path, const std::string& text, std::string_view key,
                 const std::string& note) {
  draft.set(path, text, from(key), note);
}
void Reader::choose(std::string_view section, const std::string& preset, std::string_view key,
                    const std::string& note) {
  draft.choose(section, preset, from(key), note);
}
void Reader::omit(std::string_view key, OmissionReason why, std::string reason) {
  draft.omit(from(key), *find(key), why, std::move(reason));
}
void Reader::omit(std::string_view key, const Node& value, OmissionReason why, std::string reason) {
  draft.omit(from(key), value, why, std::move(reason));
}
void Reader::omit(std::string_view key, std::string value, OmissionReason why, std::string reason,
                  std::vector<std::string> near) {
  draft.omit(from(key), std::move(value), why, std::move(reason), std::move(near));
}

}  // namespace capstan::importers

// The tables of the importers, with one rule for each key of the source format.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "importers/draft.hpp"

namespace capstan::importers {

class Reader;

struct Item {
  // The dotted key, as the table names it.
  std::string key;
  SourceKey from;
  const config::Node* value;
};

struct Rule {
  enum class Kind : uint8_t {
    // Takes the value unchanged.
    take,
    // Translates a word by the list in `text`, "theirs=ours theirs=ours".
    named,
    // The presence of the key sets the value `text`; false in a document does not.
    sets,
    // The negated truth value.
    flip,
    // Calls `act`.
    act,
    // Read by the format's own code once the table is through.
    later,
    // The key has no counterpart.
    drop,
  };
  // Dotted key; a final `*` matches any suffix. Several keys are separated by spaces.
  std::string_view key;
  // The field. act, later: the fields that the key can set, "model.vocab_size, dataset (preset)", for the
  // reference.
  std::string_view path;
  Kind kind = Kind::take;
  // named, sets: see there; drop: the reason; act, later: a remark for the reference.
  std::string_view text;
  OmissionReason why = OmissionReason::unknown;
  void (*act)(Reader&, const Item&) = nullptr;
  // later: an option without a value.
  bool flag = false;
};

constexpr Rule take(std::string_view key, std::string_view path) {
  return {key, path, Rule::Kind::take, {}, {}, nullptr};
}
constexpr Rule named(std::string_view key, std::string_view path, std::string_view words) {
  return {key, path, Rule::Kind::named, words, {}, nullptr};
}
constexpr Rule sets(std::string_view key, std::string_view path, std::string_view value) {
  return {key, path, Rule::Kind::sets, value, {}, nullptr};
}
constexpr Rule flip(std::string_view key, std::string_view path) {
  return {key, path, Rule::Kind::flip, {}, {}, nullptr};
}
constexpr Rule act(std::string_view key, void (*function)(Reader&, const Item&), std::string_view fields = {},
                   std::string_view remark = {}) {
  return {key, fields, Rule::Kind::act, remark, {}, function};
}
constexpr Rule later(std::string_view key, std::string_view fields = {}, std::string_view remark = {}) {
  return {key, fields, Rule::Kind::later, remark, {}, nullptr};
}
constexpr Rule flag(std::string_view key, std::string_view fields, std::string_view remark = {}) {
  return {key, fields, Rule::Kind::later, remark, {}, nullptr, true};
}
constexpr Rule no_effect(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::Kind::drop, reason, OmissionReason::no_effect, nullptr};
}
constexpr Rule unsupported(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::Kind::drop, reason, OmissionReason::unsupported, nullptr};
}
constexpr Rule external(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::Kind::drop, reason, OmissionReason::external, nullptr};
}
constexpr Rule to_fill_in(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::Kind::drop, reason, OmissionReason::to_fill_in, nullptr};
}

// The table with one rule for each key.
std::vector<Rule> one_rule_per_key(std::span<const Rule> table);

// Returns the rule of a key: its own, else the longest matching one that ends in `*`.
const Rule* find_rule(std::span<const Rule> table, std::string_view key);

// Applies a table to a document, or to a command line that was converted to one.
class Reader {
 public:
  Reader(Draft& into, const config::Node& document, std::span<const Rule> rules)
      : draft(into), root(document), table(rules) {}

  Draft& draft;
  const config::Node& root;
  std::span<const Rule> table;
  // Further known keys, for suggestions of similar names.
  std::vector<std::string> also_known;

  // Processes every key once, by its rule. A key without a rule is passed to `otherwise`; if that returns
  // false, the key is listed as unknown. Keys that are null, false or empty and have no counterpart are
  // listed as off.
  void apply(bool (*otherwise)(Reader&, const Item&) = nullptr);

  // Lists, at the end, the keys of Kind::later that no other call has taken or listed.
  void account();

  // Values by dotted key, for Kind::later. Absent and null give nothing; a value of another kind is listed.
  const config::Node* find(std::string_view key) const;
  SourceKey from(std::string_view key) const;
  // Whether the key is present and not null.
  bool given(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> real(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  bool is_true(std::string_view key) const { return boolean(key).value_or(false); }

  // The following functions call those of Draft, with a key of the document as the origin. Sets the field to
  // the key's value; returns false if it is absent or null.
  bool take(std::string_view path, std::string_view key, const std::string& note = {});
  void set(std::string_view path, const config::Node& value, std::string_view key,
           const std::string& note = {});
  void set(std::string_view path, const std::string& text, std::string_view key,
           const std::string& note = {});
  void choose(std::string_view section, const std::string& preset, std::string_view key,
              const std::string& note = {});
  // Lists the key as omitted, with its own value, which must be present, or with another one.
  void omit(std::string_view key, OmissionReason why, std::string reason);
  void omit(std::string_view key, const config::Node& value, OmissionReason why, std::string reason);
  void omit(std::string_view key, std::string value, OmissionReason why, std::string reason,
            std::vector<std::string> near = {});

  // Applies one rule to one value.
  void apply_rule(const Rule& rule, const Item& item);
  void unknown(const Item& item);

 private:
  void visit(const config::Node& node, const std::string& prefix, bool (*otherwise)(Reader&, const Item&));

  bool misspelled(const Rule& rule, const Item& item) const;

  // Unknown keys for which similar ones are sought.
  static constexpr int kMaxLookedUp = 200;
  int unknown_ = 0;
};

// Takes the seed of the weights and the data; returns false if the key is absent.
bool take_seed(Reader& reader, std::string_view key);

// True for null, false, "", [] and {}.
bool is_off(const config::Node& node);
// Parses true, false and their synonyms.
std::optional<bool> truth(std::string_view text);

}  // namespace capstan::importers

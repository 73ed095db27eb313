// The tables of the importers: a line for each key of theirs.
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
  // Dotted, as the table names it.
  std::string key;
  From from;
  const config::Node* value;
};

struct Rule {
  enum class How : uint8_t {
    take,   // the value as it is
    named,  // one of the words of `text`, "theirs=ours theirs=ours"
    sets,   // the key alone stands for the value `text`; a document's false undoes it
    flip,   // the other truth value
    act,    // a function
    later,  // read by the format's own code once the table is through
    drop,   // no counterpart
  };
  // Dotted below sections; a last `*` stands for any rest. Several keys are separated by blanks.
  std::string_view key;
  // The field. act, later: the fields that the key can set, "model.vocab_size, dataset (preset)", for the
  // reference.
  std::string_view path;
  How how = How::take;
  // Named, sets: above; drop: the reason; act, later: a remark for the reference.
  std::string_view text;
  Why why = Why::unknown;
  void (*act)(Reader&, const Item&) = nullptr;
  // later: an option without a value.
  bool flag = false;
};

constexpr Rule take(std::string_view key, std::string_view path) {
  return {key, path, Rule::How::take, {}, {}, nullptr};
}
constexpr Rule named(std::string_view key, std::string_view path, std::string_view words) {
  return {key, path, Rule::How::named, words, {}, nullptr};
}
constexpr Rule sets(std::string_view key, std::string_view path, std::string_view value) {
  return {key, path, Rule::How::sets, value, {}, nullptr};
}
constexpr Rule flip(std::string_view key, std::string_view path) {
  return {key, path, Rule::How::flip, {}, {}, nullptr};
}
constexpr Rule act(std::string_view key, void (*function)(Reader&, const Item&), std::string_view fields = {},
                   std::string_view remark = {}) {
  return {key, fields, Rule::How::act, remark, {}, function};
}
constexpr Rule later(std::string_view key, std::string_view fields = {}, std::string_view remark = {}) {
  return {key, fields, Rule::How::later, remark, {}, nullptr};
}
constexpr Rule flag(std::string_view key, std::string_view fields, std::string_view remark = {}) {
  return {key, fields, Rule::How::later, remark, {}, nullptr, true};
}
constexpr Rule no_effect(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::How::drop, reason, Why::no_effect, nullptr};
}
constexpr Rule not_there(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::How::drop, reason, Why::not_there, nullptr};
}
constexpr Rule theirs(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::How::drop, reason, Why::theirs, nullptr};
}
constexpr Rule to_fill_in(std::string_view key, std::string_view reason) {
  return {key, {}, Rule::How::drop, reason, Why::to_fill_in, nullptr};
}

// The table with one rule for each key.
std::vector<Rule> one_rule_per_key(std::span<const Rule> table);

// The rule of a key: its own, else the longest that ends in `*`.
const Rule* find_rule(std::span<const Rule> table, std::string_view key);

// A document (or a command line made into one) beside its table.
class Reader {
 public:
  Reader(Draft& into, const config::Node& document, std::span<const Rule> rules)
      : draft(into), root(document), table(rules) {}

  Draft& draft;
  const config::Node& root;
  std::span<const Rule> table;
  // Keys beside the table's, for near matches.
  std::vector<std::string> also_known;

  // Every key once: by its rule; without one by `otherwise`, and where that declines it is listed as unknown.
  // Keys that are null, false or empty and have no counterpart are listed as off.
  void apply(bool (*otherwise)(Reader&, const Item&) = nullptr);

  // At the end: keys of How::later that nothing has taken or listed.
  void account();

  // Values by dotted key, for How::later. Absent and null read as nothing; a value of another kind is listed.
  const config::Node* find(std::string_view key) const;
  From from(std::string_view key) const;
  // Present and not null.
  bool given(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> real(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  bool is_true(std::string_view key) const { return boolean(key).value_or(false); }

  // Draft's functions with a key of the document as the origin.
  // The key's own value; false where it is absent or null.
  bool take(std::string_view path, std::string_view key, const std::string& note = {});
  void set(std::string_view path, const config::Node& value, std::string_view key,
           const std::string& note = {});
  void set(std::string_view path, const std::string& text, std::string_view key,
           const std::string& note = {});
  void choose(std::string_view section, const std::string& preset, std::string_view key,
              const std::string& note = {});
  // Lists the key with its own value, which has to be there, or another.
  void leave(std::string_view key, Why why, std::string reason);
  void leave(std::string_view key, const config::Node& value, Why why, std::string reason);
  void leave(std::string_view key, std::string value, Why why, std::string reason,
             std::vector<std::string> near = {});

  // Applies one rule to one value.
  void apply_rule(const Rule& rule, const Item& item);
  void unknown(const Item& item);

 private:
  void visit(const config::Node& node, const std::string& prefix, bool (*otherwise)(Reader&, const Item&));

  bool misspelled(const Rule& rule, const Item& item) const;

  // Unknown keys for which similar ones are sought.
  static constexpr int kMostLookedUp = 200;
  int unknown_ = 0;
};

// Seeds weights and data alike; false where the key is absent.
bool take_seed(Reader& reader, std::string_view key);

bool is_off(const config::Node& node);             // null, false, "", [], {}
std::optional<bool> truth(std::string_view text);  // true/false and their relatives

}  // namespace capstan::importers

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

// A key of the source document with its value.
struct SourceItem {
  // The dotted key, as the table names it.
  std::string key;
  SourceKey from;
  const config::Node* value;
};

// The counterpart of a key of the source format.
struct Rule {
  enum class Kind : uint8_t {
    // Effect of each kind, and content of `text`:
    //
    //   copy            sets the field to the value; no text
    //   translate       sets the field to the counterpart of the value; "theirs=ours theirs=ours"
    //   set_if_present  sets the field to `text`, unless a document gives the key as false
    //   negate          sets the field to the negated truth value; no text
    //   call            calls `function`; a remark for the reference
    //   deferred        nothing, because code of the format reads the key later; a remark for the reference
    //   omit            lists the key as omitted, because it has no counterpart; the reason
    copy,
    translate,
    set_if_present,
    negate,
    call,
    deferred,
    omit,
  };
  // Dotted key; a final `*` matches any suffix. Several keys are separated by spaces.
  std::string_view key;
  // The field. call, deferred: the fields that the key can set, "model.vocab_size, dataset (preset)", for the
  // reference.
  std::string_view path;
  Kind kind = Kind::copy;
  std::string_view text = {};
  // omit: the kind of reason.
  OmissionReason why = OmissionReason::unknown;
  // call: receives the key and its value.
  void (*function)(Reader&, const SourceItem&) = nullptr;
  // deferred: the key is an option without a value.
  bool flag = false;
};

constexpr Rule copy(std::string_view key, std::string_view path) {
  return {.key = key, .path = path, .kind = Rule::Kind::copy};
}
// words: "theirs=ours theirs=ours".
constexpr Rule translate(std::string_view key, std::string_view path, std::string_view words) {
  return {.key = key, .path = path, .kind = Rule::Kind::translate, .text = words};
}
constexpr Rule set_if_present(std::string_view key, std::string_view path, std::string_view value) {
  return {.key = key, .path = path, .kind = Rule::Kind::set_if_present, .text = value};
}
constexpr Rule negate(std::string_view key, std::string_view path) {
  return {.key = key, .path = path, .kind = Rule::Kind::negate};
}
constexpr Rule call(std::string_view key, void (*function)(Reader&, const SourceItem&),
                    std::string_view fields = {}, std::string_view remark = {}) {
  return {.key = key, .path = fields, .kind = Rule::Kind::call, .text = remark, .function = function};
}
constexpr Rule deferred(std::string_view key, std::string_view fields = {}, std::string_view remark = {}) {
  return {.key = key, .path = fields, .kind = Rule::Kind::deferred, .text = remark};
}
// A deferred option without a value.
constexpr Rule flag(std::string_view key, std::string_view fields, std::string_view remark = {}) {
  return {.key = key, .path = fields, .kind = Rule::Kind::deferred, .text = remark, .flag = true};
}
// The following rules omit a key, each for one kind of reason.
constexpr Rule omit(std::string_view key, OmissionReason why, std::string_view reason) {
  return {.key = key, .path = {}, .kind = Rule::Kind::omit, .text = reason, .why = why};
}
constexpr Rule no_effect(std::string_view key, std::string_view reason) {
  return omit(key, OmissionReason::no_effect, reason);
}
constexpr Rule unsupported(std::string_view key, std::string_view reason) {
  return omit(key, OmissionReason::unsupported, reason);
}
constexpr Rule external(std::string_view key, std::string_view reason) {
  return omit(key, OmissionReason::external, reason);
}
constexpr Rule to_fill_in(std::string_view key, std::string_view reason) {
  return omit(key, OmissionReason::to_fill_in, reason);
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
  void apply(bool (*otherwise)(Reader&, const SourceItem&) = nullptr);

  // Lists, at the end, the keys of Kind::deferred that no other call has taken or listed.
  void account();

  // Values by dotted key, for Kind::deferred. Absent and null give nothing; a value of another kind is
  // listed.
  const config::Node* find(std::string_view key) const;
  SourceKey from(std::string_view key) const;
  // Whether the key is present and not null.
  bool given(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> real(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  bool is_true(std::string_view key) const { return boolean(key).value_or(false); }

  // The following functions call those of Draft, with a key of the document as the origin.
  //
  // Sets the field to the key's value; returns false if the key is absent or null.
  bool copy(std::string_view path, std::string_view key, const std::string& note = {});
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
  void apply_rule(const Rule& rule, const SourceItem& item);
  void unknown(const SourceItem& item);

 private:
  void visit(const config::Node& node, const std::string& prefix,
             bool (*otherwise)(Reader&, const SourceItem&));

  bool misspelled(const Rule& rule, const SourceItem& item) const;

  // Unknown keys for which similar ones are sought.
  static constexpr int kMaxLookedUp = 200;
  int unknown_ = 0;
};

// Takes the seed of the weights and the data; returns false if the key is absent.
bool take_seed(Reader& reader, std::string_view key);
// Takes the key `tf32`, which has an effect on GEMMs of fp32 only.
void take_tf32(Reader& reader, bool computes_in_fp32);
// Takes the coefficients of Megatron's load-balancing losses, one or a list. Megatron divides that of
// global_aux_loss by its data-parallel size, Capstan does not. data_parallel_size: nullopt where the file
// does not give it; the coefficient is then listed as assumed too.
void take_balance_coefficients(Reader& reader, std::string_view key,
                               std::optional<int64_t> data_parallel_size);

// Takes Megatron's moe_layer_freq: an integer, or a list with 1 for the layers with experts, which may be a
// Python expression: "([0]*3+[1]*58)".
void take_moe_layers(Reader& reader, const SourceItem& item);

// Takes the YaRN scaling of Megatron's multi-latent attention. `prefix` of its keys: "model.", or "--" for
// options, which have '-' in place of '_'. default_factor: rotary_scaling_factor where the key is absent.
void take_latent_rope(Reader& reader, std::string_view prefix, double default_factor);

// True for null, false, "", [] and {}.
bool is_off(const config::Node& node);
// Parses true, false and their synonyms.
std::optional<bool> truth(std::string_view text);

}  // namespace capstan::importers

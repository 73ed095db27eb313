// The value types a section struct may use in addition to bool, int64_t, double, std::string, enums,
// std::optional, std::vector and, for an open map in the order written,
// std::vector<std::pair<std::string, …>>. A section header includes this file and nothing heavier.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace capstan::config {

// The field table of one struct (config/core/field.hpp).
template <class S>
class Section;
// All sections, rules and derivations (config/core/field.hpp).
class Schema;
class RuleReport;

// A file name as the user wrote it, and the same made absolute: relative to the file that wrote it, or to the
// current directory for the command line. Nothing is opened or followed here.
struct Path {
  std::string text;
  std::string resolved;
  bool empty() const { return text.empty(); }
  bool operator==(const Path& other) const { return text == other.text && resolved == other.resolved; }
};

// `512 MiB` is written `512MiB`; a plain integer is bytes.
struct Bytes {
  int64_t value = 0;
  bool operator==(const Bytes& other) const { return value == other.value; }
};

// `1h30m`, `500ms`; a plain number only where the field names a unit.
struct Duration {
  double seconds = 0;
  bool operator==(const Duration& other) const { return seconds == other.seconds; }
};

// A reference to a secret, never the secret: `env:NAME` (written `${env:NAME}`) or `file:/path`. The
// reader of the secret calls read(); it is not dumped, hashed or logged anywhere.
struct Secret {
  std::string reference;
  // Throws ErrorCode::not_found when the variable or the file is missing.
  std::string read() const;
  bool operator==(const Secret& other) const { return reference == other.reference; }
};

// One value or a list of several. One is written, stored and hashed without brackets, like a plain `T`.
template <class T>
struct OneOrMore {
  OneOrMore() : items(1) {}
  OneOrMore(T one) : items{std::move(one)} {}
  explicit OneOrMore(std::vector<T> several) : items(std::move(several)) {}
  // At least one.
  std::vector<T> items;
  bool operator==(const OneOrMore& other) const { return items == other.items; }
};

// Names of an enum's values. Specialize next to the enum:
//   template <> struct EnumNames<Norm> {
//     static constexpr EnumEntry<Norm> list[] = {{Norm::layer, "LayerNorm", "mean and variance"},
//                                                {Norm::rms, "RMSNorm", "root mean square", "rms rmsnorm"}};
//   };
// aliases: further spellings that are accepted as they are, separated by blanks.
template <class E>
struct EnumEntry {
  E value;
  const char* name;
  const char* doc = "";
  const char* aliases = "";
};
template <class E>
struct EnumNames;

template <class E>
constexpr std::string_view enum_name(E value) {
  for (const auto& entry : EnumNames<E>::list)
    if (entry.value == value) return entry.name;
  return "?";
}

}  // namespace capstan::config

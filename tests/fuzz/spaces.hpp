// Schemas against which the recipe targets resolve. Each input goes against a small schema that has every
// kind of field, with a small library (tests/config/core_support.hpp); an execution then is mostly the
// reading of the input. One input of sixteen, chosen by its bytes, also goes against the shipped schema,
// which settles and checks some hundred fields each time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/resolve/resolve.hpp"
#include "config/tools/show.hpp"
#include "core_support.hpp"

namespace capstan::fuzz {

struct Small {
  using Root = config::testing::Root;
  static const config::Schema& schema() { return config::testing::test_schema(); }
  static const config::Library& library() { return config::testing::test_library(); }
};
struct Shipped {
  using Root = config::Config;
  static const config::Schema& schema() { return config::schema(); }
  static const config::Library& library() {
    static const config::Library standard = config::Library::standard();
    return standard;
  }
};

template <class Space>
struct Answer : config::Resolved {
  typename Space::Root root;
  std::string recipe() const { return config::resolved_recipe(Space::schema(), &root, *this); }
  std::vector<config::Change> changes_to(const Answer& other) const {
    return config::diff(Space::schema(), &root, *this, &other.root, other);
  }
};

template <class Space>
Answer<Space> resolve(const config::Request& request) {
  Answer<Space> answer;
  static_cast<config::Resolved&>(answer) =
      config::resolve_into(Space::schema(), Space::library(), &answer.root, request);
  return answer;
}

inline bool also_shipped(const uint8_t* data, size_t size) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 16777619u;
  return hash >> 28 == 0;
}

}  // namespace capstan::fuzz

// Sanitizers look for addresses, undefined behavior and races, for which one run of each code path is enough:
// where a test repeats the same work to compare its bits, a sanitizer build runs it once. Where it takes many
// steps or cases of one path, such as a loss curve or every shipped recipe, a sanitizer build takes few.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace capstan::test {

#ifdef CAPSTAN_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Whether the address sanitizer ends the program at an access outside of a block.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kAddressSanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool kAddressSanitized = false;
#endif

// Every seventh of many cases in a sanitizer build, else all.
template <class T>
std::vector<T> sampled(std::vector<T> cases) {
  if (!kSanitized) return cases;
  std::vector<T> few;
  for (size_t i = 0; i < cases.size(); i += 7) few.push_back(std::move(cases[i]));
  return few;
}

}  // namespace capstan::test

#include "kernels/simulated/overflow.hpp"

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace capstan::kernels::simulated {

namespace {
thread_local std::string overflow;
}  // namespace

std::string take_overflow() {
  return std::exchange(overflow, {});
}
void throw_overflow() {
  if (!overflow.empty()) [[unlikely]]
    fail(ErrorCode::internal, take_overflow());
}
void report_narrowing(int64_t value, size_t bytes, Location at) {
  fail(ErrorCode::internal, at.text() + ": " + std::to_string(value) + " does not fit into an integer of " +
                                std::to_string(8 * bytes) + " bits");
}

}  // namespace capstan::kernels::simulated

// The compiler calls these functions where a signed integer overflows (-fsanitize=signed-integer-overflow,
// CMakeLists.txt). Builds with the sanitizer's own library end the program there.
#ifdef CAPSTAN_REPORTS_OVERFLOW
namespace {
// The first member of what the compiler passes.
struct OverflowLocation {
  const char* file;
  uint32_t line, column;
};
// Exceptions cannot leave these functions, because the compiler takes them for functions that return.
void note(const OverflowLocation* at, const char* operation) {
  std::string& text = capstan::kernels::simulated::overflow;
  if (text.empty())
    text = std::string(at->file) + ":" + std::to_string(at->line) + ": " + operation + " overflows its type";
}
}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler's names
extern "C" {
void __ubsan_handle_add_overflow(const OverflowLocation* at, uintptr_t, uintptr_t);
void __ubsan_handle_sub_overflow(const OverflowLocation* at, uintptr_t, uintptr_t);
void __ubsan_handle_mul_overflow(const OverflowLocation* at, uintptr_t, uintptr_t);
void __ubsan_handle_divrem_overflow(const OverflowLocation* at, uintptr_t, uintptr_t);
void __ubsan_handle_negate_overflow(const OverflowLocation* at, uintptr_t);

void __ubsan_handle_add_overflow(const OverflowLocation* at, uintptr_t, uintptr_t) {
  note(at, "a sum");
}
void __ubsan_handle_sub_overflow(const OverflowLocation* at, uintptr_t, uintptr_t) {
  note(at, "a difference");
}
void __ubsan_handle_mul_overflow(const OverflowLocation* at, uintptr_t, uintptr_t) {
  note(at, "a product");
}
void __ubsan_handle_divrem_overflow(const OverflowLocation* at, uintptr_t, uintptr_t) {
  note(at, "a quotient");
}
void __ubsan_handle_negate_overflow(const OverflowLocation* at, uintptr_t) {
  note(at, "a negation");
}
}
// NOLINTEND(bugprone-reserved-identifier)
#endif

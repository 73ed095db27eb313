#include "base/error.hpp"

#include <utility>

#include "base/actions.hpp"

namespace capstan {

std::string_view name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::usage:
      return "usage";
    case ErrorCode::config:
      return "config";
    case ErrorCode::not_found:
      return "not_found";
    case ErrorCode::format:
      return "format";
    case ErrorCode::io:
      return "io";
    case ErrorCode::failed:
      return "failed";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::no_fit:
      return "no_fit";
    case ErrorCode::rank_failure:
      return "rank_failure";
    case ErrorCode::internal:
      return "internal";
  }
  return "internal";
}

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::usage:
    case ErrorCode::config:
    case ErrorCode::not_found:
    case ErrorCode::format:
      return 2;
    case ErrorCode::io:
    case ErrorCode::failed:
    case ErrorCode::unsupported:
      return 1;
    case ErrorCode::no_fit:
      return 3;
    case ErrorCode::rank_failure:
      return 4;
    case ErrorCode::internal:
      return 70;
  }
  return 70;
}

Error::Error(ErrorCode code, std::string message, std::string help)
    : code_(code),
      message_(std::move(message)),
      marked_help_(std::move(help)),
      help_(plain_actions(marked_help_)) {
  compose();
}

Error& Error::in(std::string context) {
  context_.push_back(std::move(context));
  compose();
  return *this;
}

void Error::compose() {
  what_ = message_;
  for (const auto& line : context_) what_ += "\n  " + line;
  if (!help_.empty()) what_ += "\n  help: " + help_;
}

void fail(ErrorCode code, std::string message, std::string help) {
  throw Error(code, std::move(message), std::move(help));
}

void assertion_failed(const char* condition, const std::string& text, const char* file, int line) {
  std::string_view path = file;
  if (auto slash = path.find("/src/"); slash != std::string_view::npos) path.remove_prefix(slash + 1);
  fail(ErrorCode::internal,
       "internal error: " + text + " (" + condition + ", " + std::string(path) + ":" + std::to_string(line) +
           ")",
       "this is a bug in Capstan: please report it with the command line and the recipe");
}

}  // namespace capstan

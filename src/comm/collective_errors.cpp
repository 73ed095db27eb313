#include "comm/collective_errors.hpp"

#include <algorithm>
#include <exception>

#include "base/error.hpp"

namespace capstan::comm {

std::vector<std::string> gather_texts(Communicator& group, const std::string& mine) {
  const auto size = static_cast<size_t>(group.size());
  int64_t length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(size);
  group.all_gather(&length, lengths.data(), sizeof length);
  const int64_t longest = std::max<int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
  std::string padded = mine, all(size * static_cast<size_t>(longest), '\0');
  padded.resize(static_cast<size_t>(longest));
  group.all_gather(padded.data(), all.data(), longest);
  std::vector<std::string> texts;
  for (size_t r = 0; r < size; ++r)
    texts.push_back(all.substr(r * static_cast<size_t>(longest), static_cast<size_t>(lengths[r])));
  return texts;
}

void run_collectively(Communicator& group, const char* what, FunctionRef<void()> work) {
  std::exception_ptr error;
  std::string text;
  try {
    work();
  } catch (const std::exception& e) {
    error = std::current_exception();
    text = e.what();
    if (text.empty()) text = "unknown error";
  }
  if (group.is_single()) {
    if (error) std::rethrow_exception(error);
    return;
  }
  const auto texts = gather_texts(group, text);
  if (error) std::rethrow_exception(error);
  for (size_t r = 0; r < texts.size(); ++r)
    if (!texts[r].empty())
      fail(ErrorCode::rank_failure,
           std::string(what) + " failed on rank " + std::to_string(r) + ": " + texts[r]);
}

}  // namespace capstan::comm

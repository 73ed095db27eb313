#include <deque>
#include <mutex>
#include <set>

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/notes.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Never destroyed: a log may read the texts at the end of a process.
struct Notes {
  std::mutex mutex;
  std::set<std::string> all;
  std::deque<const char*> unread;
};
Notes& notes() {
  static Notes& state = *new Notes;
  return state;
}

}  // namespace

void add_note(const std::string& text) {
  const std::scoped_lock lock(notes().mutex);
  if (const auto [entry, is_new] = notes().all.insert(text); is_new) notes().unread.push_back(entry->c_str());
}

const char* next_note() {
  const std::scoped_lock lock(notes().mutex);
  if (notes().unread.empty()) return nullptr;
  const char* const text = notes().unread.front();
  notes().unread.pop_front();
  return text;
}

}  // namespace capstan::kernels::CAPSTAN_GPU

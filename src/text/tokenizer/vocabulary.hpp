// The tokens of a tokenizer: id ↔ text as the file has it, and id → the bytes that it stands for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::text {

class Vocabulary {
 public:
  // Ids 0 … size-1, none of them taken yet.
  explicit Vocabulary(int64_t size);

  enum class Added : uint8_t { yes, id_taken, text_taken };
  // Adds a token with 0 <= id < size() and a text that is not empty. Tokens without `of_model` are added
  // tokens, which only TokenFinder finds.
  Added add(std::string_view text, int32_t id, bool of_model = true);

  int64_t size() const { return static_cast<int64_t>(spans_.size()); }
  std::optional<int32_t> find(std::string_view text) const;
  std::optional<int32_t> find_of_model(std::string_view text) const {
    const auto id = find(text);
    return id && of_model(*id) ? id : std::nullopt;
  }
  bool of_model(int32_t id) const { return spans_[static_cast<size_t>(id)].of_model; }
  bool has(int32_t id) const { return id >= 0 && id < size() && spans_[static_cast<size_t>(id)].bytes != 0; }
  // Empty for an id that no token has.
  std::string_view text(int32_t id) const;

 private:
  struct Span {
    uint64_t offset = 0;
    // Length of the text; 0: no token has this id.
    uint32_t bytes = 0;
    bool of_model = true;
  };
  std::string arena_;
  std::vector<Span> spans_;
  // Open addressing, at most half full.
  struct Slot {
    uint32_t tag;
    // -1 in a free slot.
    int32_t id;
  };
  std::vector<Slot> slots_;
  uint64_t mask_;
};

}  // namespace capstan::text

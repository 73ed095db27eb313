#include "text/tokenizer/vocabulary.hpp"

#include <xxhash.h>

#include <bit>

namespace capstan::text {

Vocabulary::Vocabulary(int64_t size)
    : spans_(static_cast<size_t>(size)),
      slots_(std::bit_ceil(static_cast<uint64_t>(size) * 2 + 2), Slot{0, -1}),
      mask_(slots_.size() - 1) {}

Vocabulary::Added Vocabulary::add(std::string_view text, int32_t id, bool of_model) {
  Span& span = spans_[static_cast<size_t>(id)];
  if (span.bytes != 0) return Added::id_taken;
  const uint64_t hash = XXH3_64bits(text.data(), text.size());
  const auto tag = static_cast<uint32_t>(hash >> 32);
  uint64_t i = hash & mask_;
  for (; slots_[i].id >= 0; i = (i + 1) & mask_)
    if (slots_[i].tag == tag && this->text(slots_[i].id) == text) return Added::text_taken;
  slots_[i] = {tag, id};
  span = {arena_.size(), static_cast<uint32_t>(text.size()), of_model};
  arena_ += text;
  return Added::yes;
}

std::optional<int32_t> Vocabulary::find(std::string_view text) const {
  const uint64_t hash = XXH3_64bits(text.data(), text.size());
  const auto tag = static_cast<uint32_t>(hash >> 32);
  for (uint64_t i = hash & mask_; slots_[i].id >= 0; i = (i + 1) & mask_)
    if (slots_[i].tag == tag && this->text(slots_[i].id) == text) return slots_[i].id;
  return std::nullopt;
}

std::string_view Vocabulary::text(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  const Span& span = spans_[static_cast<size_t>(id)];
  return {arena_.data() + span.offset, span.bytes};
}

}  // namespace capstan::text

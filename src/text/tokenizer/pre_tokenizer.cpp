#include "text/tokenizer/pre_tokenizer.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/tokenizer/scanners.hpp"

namespace capstan::text {

const std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// Of gpt-oss and GPT-4o: letters are also split where their case changes.
const std::string_view kO200kPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

bool known_pattern(std::string_view regex, PreTokenizerStep::Kind& kind) {
  using Kind = PreTokenizerStep::Kind;
  // The pattern of cl100k as tiktoken writes it. It matches the same texts as kLlama3Pattern: its possessive
  // quantifiers do not change a match, and in \s*[\r\n] the greedy \s* takes all newlines but the last.
  constexpr std::string_view kCl100k =
      R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
  if (regex == kGpt2Pattern) return kind = Kind::gpt2, true;
  if (regex == kLlama3Pattern || regex == kCl100k) return kind = Kind::llama3, true;
  if (regex == kQwen2Pattern) return kind = Kind::qwen2, true;
  return false;
}

namespace {

// Fills `out` with pieces from `position` on, moves it after them and returns their number.
template <class Next>
size_t scan_pieces(const scan::Context& text, const char*& position, std::string_view* out, size_t most,
                   Next next) {
  size_t count = 0;
  const char* p = position;
  while (count < most && p < text.end) {
    const char* const q = next(text, p);
    out[count++] = {p, static_cast<size_t>(q - p)};
    p = q;
  }
  position = p;
  return count;
}

size_t scan_kind(PreTokenizerStep::Kind kind, const scan::Context& text, const char*& position,
                 std::string_view* out, size_t most) {
  using Kind = PreTokenizerStep::Kind;
  switch (kind) {
    case Kind::gpt2:
      return scan_pieces(text, position, out, most, scan::gpt2);
    case Kind::llama3:
      return scan_pieces(text, position, out, most, scan::llama3<3>);
    case Kind::qwen2:
      return scan_pieces(text, position, out, most, scan::llama3<1>);
    case Kind::single_digits:
      return scan_pieces(text, position, out, most, [](const scan::Context& t, const char* p) {
        const auto c = t.at(p);
        if (c.bits & kNumber) return p + c.bytes;
        return t.skip(p, [](uint8_t bits) { return !(bits & kNumber); });
      });
    case Kind::digit_groups:
      return scan_pieces(text, position, out, most, [](const scan::Context& t, const char* p) {
        const uint8_t wanted = t.at(p).bits & kNumber;
        return t.skip(p, [wanted](uint8_t bits) { return (bits & kNumber) == wanted; });
      });
    default:
      break;
  }
  out[0] = {position, static_cast<size_t>(text.end - position)};
  position = text.end;
  return 1;
}

void flush(PreTokenizer::Scratch& scratch, FunctionRef<void(const PieceBatch&)> sink) {
  if (scratch.count > 0) sink({{scratch.batch.data(), scratch.count}, scratch.readable_end});
  scratch.count = 0;
}

}  // namespace

void merge_segments(SplitBehavior behavior, std::vector<SplitSegment>& parts) {
  std::vector<SplitSegment> merged;
  switch (behavior) {
    case SplitBehavior::isolated:
      return;
    case SplitBehavior::removed:
      for (const SplitSegment& part : parts)
        if (!part.match) merged.push_back(part);
      break;
    case SplitBehavior::contiguous:
    case SplitBehavior::merged_with_previous: {
      bool before = false;
      for (const SplitSegment& part : parts) {
        const bool join =
            behavior == SplitBehavior::contiguous ? part.match == before : part.match && !before;
        if (join && !merged.empty())
          merged.back().end = part.end;
        else
          merged.push_back(part);
        before = part.match;
      }
      break;
    }
    case SplitBehavior::merged_with_next: {
      bool before = false;
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        if (part->match && !before && !merged.empty())
          merged.back().begin = part->begin;
        else
          merged.push_back(*part);
        before = part->match;
      }
      std::reverse(merged.begin(), merged.end());
      break;
    }
  }
  parts.swap(merged);
}

void split_piece(const PreTokenizerStep& step, std::string_view text, std::vector<std::string_view>& out) {
  if (step.kind != PreTokenizerStep::Kind::pattern) {
    const scan::Context context{unicode_classes(), text.data() + text.size()};
    const char* position = text.data();
    while (position < context.end) {
      std::array<std::string_view, 64> local;
      const size_t count = scan_kind(step.kind, context, position, local.data(), local.size());
      out.insert(out.end(), local.begin(), local.begin() + count);
    }
    return;
  }
  std::vector<SplitSegment> parts;
  size_t previous = 0;
  step.pattern->find_all(text, [&](size_t begin, size_t end) {
    if (begin < previous) return;
    if (previous != begin) parts.push_back({previous, begin, step.invert});
    parts.push_back({begin, end, !step.invert});
    previous = end;
  });
  if (previous != text.size()) parts.push_back({previous, text.size(), step.invert});
  merge_segments(step.behavior, parts);
  for (const SplitSegment& part : parts)
    if (part.begin < part.end) out.push_back(text.substr(part.begin, part.end - part.begin));
}

void PreTokenizer::run(std::string_view text, Scratch& scratch,
                       FunctionRef<void(const PieceBatch&)> sink) const {
  scratch.prefixed.resize(steps.size());
  scratch.pieces.resize(steps.size());
  scratch.count = 0;
  scratch.readable_end = text.data() + text.size();
  run_step(0, text, scratch, sink);
  flush(scratch, sink);
}

void PreTokenizer::run_step(size_t index, std::string_view text, Scratch& scratch,
                            FunctionRef<void(const PieceBatch&)> sink) const {
  if (text.empty()) return;
  if (index == steps.size()) {
    if (scratch.count == kBatch) flush(scratch, sink);
    scratch.batch[scratch.count++] = text;
    return;
  }
  const PreTokenizerStep& step = steps[index];
  const char* const outer_end = scratch.readable_end;
  const bool prefix = step.add_prefix_space && text.front() != ' ';
  if (prefix) {
    // The pieces of the batch may point into the buffer that the next line changes.
    flush(scratch, sink);
    std::string& copy = scratch.prefixed[index];
    copy.assign(1, ' ').append(text);
    text = copy;
    scratch.readable_end = text.data() + text.size();
  }
  const bool last = index + 1 == steps.size();
  if (step.kind == PreTokenizerStep::Kind::pattern) {
    auto& pieces = scratch.pieces[index];
    pieces.clear();
    split_piece(step, text, pieces);
    for (const std::string_view piece : pieces) run_step(index + 1, piece, scratch, sink);
  } else {
    const scan::Context context{unicode_classes(), text.data() + text.size()};
    const char* position = text.data();
    std::array<std::string_view, 64> local;
    while (position < context.end) {
      if (last) {
        if (scratch.count == kBatch) flush(scratch, sink);
        scratch.count += scan_kind(step.kind, context, position, scratch.batch.data() + scratch.count,
                                   kBatch - scratch.count);
      } else {
        const size_t count = scan_kind(step.kind, context, position, local.data(), local.size());
        for (size_t i = 0; i < count; ++i) run_step(index + 1, local[i], scratch, sink);
      }
    }
  }
  if (prefix) {
    flush(scratch, sink);
    scratch.readable_end = outer_end;
  }
}

}  // namespace capstan::text

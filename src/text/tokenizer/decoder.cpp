#include "text/tokenizer/decoder.hpp"

#include <algorithm>
#include <array>

#include "base/utf8.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/text_pieces.hpp"
#include "text/tokenizer/utf8_lossy.hpp"

namespace capstan::text {

namespace {

using StepKind = DecoderStep::Kind;

std::string replaced(std::string_view text, std::string_view what, std::string_view with) {
  std::string result;
  size_t done = 0;
  for (size_t at = what.empty() ? std::string_view::npos : text.find(what); at != std::string_view::npos;
       at = text.find(what, done)) {
    result += text.substr(done, at - done);
    result += with;
    done = at + what.size();
  }
  return result.append(text.substr(done));
}

std::string clean(std::string text) {
  constexpr std::array<std::array<std::string_view, 2>, 11> kRules = {{{" .", "."},
                                                                       {" ?", "?"},
                                                                       {" !", "!"},
                                                                       {" ,", ","},
                                                                       {" ' ", "'"},
                                                                       {" n't", "n't"},
                                                                       {" 'm", "'m"},
                                                                       {" do not", " don't"},
                                                                       {" 's", "'s"},
                                                                       {" 've", "'ve"},
                                                                       {" 're", "'re"}}};
  for (const auto& [what, with] : kRules)
    if (text.find(what) != std::string::npos) text = replaced(text, what, with);
  return text;
}

// Returns the text without up to `start` characters `content` at its beginning and `stop` at its end.
std::string_view stripped(std::string_view text, std::string_view character, size_t start, size_t stop) {
  size_t begin = 0, end = text.size();
  for (; start > 0 && text.substr(begin).starts_with(character); --start) begin += character.size();
  for (; stop > 0 && text.substr(0, end).ends_with(character); --stop) end -= character.size();
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

}  // namespace

int byte_of_fallback(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
  };
  const int high = digit(token[3]), low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

DecoderRun::DecoderRun(const Decoder& decoder, bool raw, bool inside)
    : decoder_(&decoder), raw_(raw), states_(decoder.steps.size()), text_seen_(inside) {
  bool joined = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].joined = joined;
    states_[i].first = !inside;
    states_[i].inside = inside;
    const StepKind kind = decoder.steps[i].kind;
    joined = joined || kind == StepKind::fuse || kind == StepKind::byte_level;
  }
}

void DecoderRun::push(int32_t id, std::string_view text, std::string& out) {
  token(0, id, text, out);
}

void DecoderRun::finish(std::string& out) {
  end(0, out);
}

void DecoderRun::token(size_t step, int32_t id, std::string_view text, std::string& out) {
  if (step == states_.size()) {
    out += text;
    return;
  }
  const DecoderStep& own = decoder_->steps[step];
  State& state = states_[step];
  // The texts are parts of one token.
  if (state.joined) {
    if (own.kind == StepKind::fuse)
      token(step + 1, id, text, out);
    else if (own.kind == StepKind::strip)
      push_strip(step, text, out);
    else
      state.pending += text;
    return;
  }
  const bool first = state.first;
  state.first = false;
  switch (own.kind) {
    case StepKind::byte_level: {
      if (!append_text_bytes(state.pending, text)) state.pending += text;
      std::string complete;
      if (raw_) {
        complete.swap(state.pending);
      } else {
        state.pending.erase(0, append_lossy(complete, state.pending, false));
      }
      if (!complete.empty()) token(step + 1, id, complete, out);
      break;
    }
    case StepKind::metaspace:
      token(step + 1, id, replaced(text, own.content, first && own.prepended ? "" : " "), out);
      break;
    case StepKind::replace: {
      std::string changed;
      size_t done = 0;
      own.pattern->find_all(text, [&](size_t begin, size_t stop) {
        if (begin < done) return;
        changed.append(text.substr(done, begin - done)).append(own.content);
        done = stop;
      });
      token(step + 1, id, changed.append(text.substr(done)), out);
      break;
    }
    case StepKind::byte_fallback:
      if (const int byte = byte_of_fallback(text); byte < 0) {
        flush_fallback(step, out);
        token(step + 1, id, text, out);
      } else if (raw_) {
        const char raw = static_cast<char>(byte);
        token(step + 1, id, {&raw, 1}, out);
      } else {
        state.pending += static_cast<char>(byte);
      }
      break;
    case StepKind::fuse:
      token(step + 1, id, text, out);
      break;
    case StepKind::strip:
      token(step + 1, id, stripped(text, own.content, own.start, own.stop), out);
      break;
    case StepKind::word_piece: {
      std::string word;
      if (first)
        word = text;
      else if (text.starts_with(own.content))
        word = text.substr(own.content.size());
      else
        word.append(" ").append(text);
      token(step + 1, id, own.cleanup ? clean(std::move(word)) : word, out);
      break;
    }
    case StepKind::bpe:
      if (!first) token(step + 1, id, replaced(state.pending, own.content, " "), out);
      state.pending = text;
      break;
    case StepKind::spaced:
      if (!first) token(step + 1, id, " ", out);
      token(step + 1, id, text, out);
      break;
    case StepKind::sentencepiece:
      push_sentencepiece(step, id, text, out);
      break;
  }
}

void DecoderRun::end(size_t step, std::string& out) {
  if (step == states_.size()) return;
  const DecoderStep& own = decoder_->steps[step];
  State& state = states_[step];
  const std::string left = std::move(state.pending);
  state.pending.clear();
  if (state.joined && own.kind == StepKind::strip) {
    // Removes up to `stop` of the characters that are held back at the end.
    token(step + 1, -1, stripped(left, own.content, 0, own.stop), out);
  } else if (state.joined && own.kind != StepKind::fuse) {
    state.joined = false;
    state.first = true;
    token(step, -1, left, out);
    return end(step, out);
  } else if (own.kind == StepKind::byte_level) {
    std::string text;
    append_lossy(text, left, true);
    if (!text.empty()) token(step + 1, -1, text, out);
  } else if (own.kind == StepKind::byte_fallback) {
    state.pending = left;
    flush_fallback(step, out);
  } else if (own.kind == StepKind::bpe) {
    if (!state.first) token(step + 1, -1, replaced(left, own.content, ""), out);
  } else if (own.kind == StepKind::sentencepiece) {
    state.pending = left;
    flush_pieces(step, true, out);
  }
  end(step + 1, out);
}

// The texts are parts of one token: characters at its beginning are removed at once, and those at the end are
// held back.
void DecoderRun::push_strip(size_t step, std::string_view text, std::string& out) {
  const DecoderStep& own = decoder_->steps[step];
  State& state = states_[step];
  state.pending += text;
  std::string_view rest = state.pending;
  while (!state.inside && !rest.empty()) {
    if (state.stripped < own.start && rest.starts_with(own.content)) {
      rest.remove_prefix(own.content.size());
      ++state.stripped;
    } else {
      state.inside = true;
    }
  }
  size_t kept = rest.size();
  for (size_t n = 0; n < own.stop && rest.substr(0, kept).ends_with(own.content); ++n)
    kept -= own.content.size();
  const std::string ready(rest.substr(0, kept));
  state.pending = std::string(rest.substr(kept));
  if (!ready.empty()) token(step + 1, -1, ready, out);
}

void DecoderRun::flush_fallback(size_t step, std::string& out) {
  const std::string bytes = std::move(states_[step].pending);
  states_[step].pending.clear();
  if (bytes.empty()) return;
  if (!first_invalid_utf8(bytes)) {
    token(step + 1, -1, bytes, out);
    return;
  }
  for (size_t i = 0; i < bytes.size(); ++i) token(step + 1, -1, kReplacementCharacter, out);
}

// Emits the bytes of complete characters, and U+FFFD for each invalid byte.
void DecoderRun::flush_pieces(size_t step, bool last, std::string& out) {
  std::string& pending = states_[step].pending;
  size_t at = 0;
  while (at < pending.size()) {
    const CodePoint c = decode_utf8(pending, at);
    const bool broken = c.bytes == 1 && c.value == 0xFFFD;
    if (broken && !last) {
      // An incomplete character is kept until its remaining bytes arrive.
      std::string probe;
      if (append_lossy(probe, std::string_view(pending).substr(at), false) == 0) break;
    }
    token(step + 1, -1,
          broken ? kReplacementCharacter : std::string_view(pending).substr(at, static_cast<size_t>(c.bytes)),
          out);
    text_seen_ = true;
    at += static_cast<size_t>(c.bytes);
  }
  pending.erase(0, at);
}

void DecoderRun::push_sentencepiece(size_t step, int32_t id, std::string_view text, std::string& out) {
  State& state = states_[step];
  const bool piece = id >= 0 && static_cast<size_t>(id) < decoder_->kinds.size();
  const PieceKind kind = piece ? decoder_->kinds[static_cast<size_t>(id)] : PieceKind::control;
  if (kind == PieceKind::byte) {
    const char byte = static_cast<char>(byte_of_fallback(text));
    if (raw_) {
      token(step + 1, id, {&byte, 1}, out);
      text_seen_ = true;
    } else {
      state.pending += byte;
      flush_pieces(step, false, out);
    }
    return;
  }
  flush_pieces(step, true, out);
  if (space_seen_ || text_seen_) state.inside = true;
  space_seen_ = false;
  std::string surface;
  if (!piece) {
    surface = text;
  } else if (kind == PieceKind::unknown) {
    surface = decoder_->unknown_surface;
  } else if (kind != PieceKind::control) {
    if (!state.inside && decoder_->strip_first_space && text.starts_with(kMetaspace)) {
      text.remove_prefix(kMetaspace.size());
      space_seen_ = !decoder_->strip_all_first_spaces;
    }
    surface = replaced(text, kMetaspace, " ");
  }
  text_seen_ = text_seen_ || !surface.empty();
  if (!surface.empty()) token(step + 1, id, surface, out);
}

}  // namespace capstan::text

#include "text/tokenizer/sentencepiece.hpp"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "base/error.hpp"
#include "text/tokenizer/text_pieces.hpp"
#include "text/tokenizer/utf8_lossy.hpp"

namespace capstan::text {

namespace {

class NormalizerStep : public TextStep {
 public:
  explicit NormalizerStep(const SentencePieceNormalizer& options) : options_(options) {}
  void apply(TextPieces& pieces) const override {
    pieces.rewrite([this](std::string_view text, std::string& out, std::vector<OffsetRange>& from) {
      normalize(text, out, from);
    });
  }

 private:
  struct Prefix {
    std::string_view text;
    // Number of bytes of the input.
    size_t bytes;
  };

  Prefix normalize_prefix(std::string_view text) const {
    size_t kept = 0;
    options_.user_defined->prefixes(text, [&](size_t bytes, int32_t) { kept = bytes; });
    if (kept > 0) return {text.substr(0, kept), kept};
    if (options_.charsmap)
      if (const auto match = options_.charsmap->longest(text)) return {match->text, match->bytes};
    const CodePoint c = decode_character(text.data(), text.data() + text.size());
    if (c.value == 0xFFFD && c.bytes == 1) return {kReplacementCharacter, 1};
    return {text.substr(0, c.bytes), c.bytes};
  }

  void normalize(std::string_view text, std::string& out, std::vector<OffsetRange>& from) const {
    const std::string_view space = options_.escape_spaces ? kMetaspace : std::string_view(" ");
    size_t at = 0;
    if (options_.remove_extra_spaces)
      while (at < text.size()) {
        const Prefix prefix = normalize_prefix(text.substr(at));
        if (prefix.text != " ") break;
        at += prefix.bytes;
      }
    if (at == text.size()) return;
    const auto put = [&](std::string_view part, OffsetRange range) {
      out += part;
      from.resize(out.size(), range);
    };
    if (options_.add_dummy_prefix && !options_.space_as_suffix) put(space, {at, at});
    bool after_space = options_.remove_extra_spaces;
    while (at < text.size()) {
      const Prefix prefix = normalize_prefix(text.substr(at));
      const OffsetRange range{at, at + prefix.bytes};
      std::string_view rest = prefix.text;
      if (after_space) rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
      for (const char c : rest) put(c == ' ' ? space : std::string_view(&c, 1), range);
      if (!rest.empty()) after_space = rest.ends_with(' ');
      at += prefix.bytes;
      if (!options_.remove_extra_spaces) after_space = false;
    }
    if (options_.remove_extra_spaces)
      while (out.ends_with(space)) out.resize(out.size() - space.size());
    from.resize(out.size());
    if (options_.add_dummy_prefix && options_.space_as_suffix) put(space, {at, at});
  }

  SentencePieceNormalizer options_;
};

}  // namespace

TextStepPtr sentencepiece_step(const SentencePieceNormalizer& normalizer) {
  return std::make_shared<NormalizerStep>(normalizer);
}

struct SentencePieceBpe::Scratch final : Model::Scratch {
  struct Symbol {
    // Range of the symbol; size 0: it was merged into another one.
    size_t begin, size;
    int32_t previous, next;
    bool frozen;
  };
  struct Pair {
    double score;
    int32_t left;
    size_t size;
    // The best pair is the greatest.
    bool operator<(const Pair& other) const {
      return score < other.score || (score == other.score && left > other.left);
    }
  };
  std::vector<Symbol> symbols;
  std::vector<Pair> agenda;
  size_t bytes() const override {
    return symbols.capacity() * sizeof(Symbol) + agenda.capacity() * sizeof(Pair);
  }
};

SentencePieceBpe::SentencePieceBpe(const Vocabulary& vocabulary, std::vector<double> scores,
                                   std::vector<PieceKind> kinds, int32_t unknown,
                                   const std::vector<int32_t>& byte_ids)
    : vocabulary_(vocabulary),
      scores_(std::move(scores)),
      kinds_(std::move(kinds)),
      unknown_(unknown),
      byte_ids_(byte_ids) {
  std::vector<std::pair<std::string_view, int32_t>> user_defined;
  for (size_t id = 0; id < kinds_.size(); ++id)
    if (kinds_[id] == PieceKind::user_defined)
      user_defined.emplace_back(vocabulary.text(static_cast<int32_t>(id)), static_cast<int32_t>(id));
  user_defined_ = ByteTrie(std::move(user_defined));
}

std::unique_ptr<Model::Scratch> SentencePieceBpe::make_scratch() const {
  return std::make_unique<Scratch>();
}

int32_t SentencePieceBpe::piece_id(std::string_view piece) const {
  return vocabulary_.find_of_model(piece).value_or(-1);
}

void SentencePieceBpe::encode_piece(std::string_view piece, Model::Scratch& scratch,
                                    std::vector<ModelToken>& out) const {
  if (piece.size() >= size_t{std::numeric_limits<int32_t>::max()})
    fail(ErrorCode::unsupported, "a piece of text of " + std::to_string(piece.size()) +
                                     " bytes cannot be split into words; the limit is 2 GiB");
  auto& own = static_cast<Scratch&>(scratch);
  auto& symbols = own.symbols;
  auto& agenda = own.agenda;
  symbols.clear();
  agenda.clear();
  for (size_t at = 0; at < piece.size();) {
    size_t bytes = 0;
    user_defined_.prefixes(piece.substr(at), [&](size_t length, int32_t) { bytes = length; });
    const bool frozen = bytes > 0;
    if (!frozen) bytes = decode_character(piece.data() + at, piece.data() + piece.size()).bytes;
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({at, bytes, index - 1, index + 1, frozen});
    at += bytes;
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  // Unused pieces take part in merges, and are split again at the end.
  std::unordered_map<std::string_view, size_t> joined_at;
  const auto symbol = [&](int32_t index) -> Scratch::Symbol& { return symbols[static_cast<size_t>(index)]; };
  const auto push = [&](int32_t left) {
    if (left < 0) return;
    const int32_t right = symbol(left).next;
    if (right < 0 || symbol(left).frozen || symbol(right).frozen) return;
    const std::string_view text = piece.substr(symbol(left).begin, symbol(left).size + symbol(right).size);
    const int32_t id = piece_id(text);
    if (id < 0) return;
    agenda.push_back({scores_[static_cast<size_t>(id)], left, text.size()});
    std::push_heap(agenda.begin(), agenda.end());
    if (kinds_[static_cast<size_t>(id)] == PieceKind::unused) joined_at[text] = symbol(left).size;
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) push(static_cast<int32_t>(i));
  while (!agenda.empty()) {
    std::pop_heap(agenda.begin(), agenda.end());
    const Scratch::Pair top = agenda.back();
    agenda.pop_back();
    Scratch::Symbol& left = symbol(top.left);
    if (left.size == 0 || left.next < 0 || left.size + symbol(left.next).size != top.size) continue;
    Scratch::Symbol& right = symbol(left.next);
    left.size += right.size;
    right.size = 0;
    left.next = right.next;
    if (left.next >= 0) symbol(left.next).previous = top.left;
    push(left.previous);
    push(top.left);
  }

  bool after_unknown = false;
  const auto add = [&](size_t begin, size_t size) {
    const int32_t id = piece_id(piece.substr(begin, size));
    if (id >= 0) {
      out.push_back({id, begin, begin + size});
    } else if (!byte_ids_.empty()) {
      for (const char c : piece.substr(begin, size))
        out.push_back({byte_ids_[static_cast<unsigned char>(c)], begin, begin + size});
    } else if (after_unknown) {
      out.back().end = begin + size;
    } else {
      out.push_back({unknown_, begin, begin + size});
    }
    after_unknown = id < 0;
  };
  // Ranges to be split again, the first on top.
  std::vector<OffsetRange> open;
  for (int32_t index = 0; index >= 0; index = symbol(index).next) {
    open.push_back({symbol(index).begin, symbol(index).begin + symbol(index).size});
    while (!open.empty()) {
      const OffsetRange part = open.back();
      open.pop_back();
      const std::string_view text = piece.substr(part.begin, part.end - part.begin);
      const int32_t id = piece_id(text);
      const auto split = id >= 0 && kinds_[static_cast<size_t>(id)] == PieceKind::unused
                             ? joined_at.find(text)
                             : joined_at.end();
      if (split == joined_at.end()) {
        add(part.begin, part.end - part.begin);
      } else {
        open.push_back({part.begin + split->second, part.end});
        open.push_back({part.begin, part.begin + split->second});
      }
    }
  }
}

}  // namespace capstan::text

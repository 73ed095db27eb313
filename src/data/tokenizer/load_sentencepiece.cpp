// SentencePiece's ModelProto → TokenizerSpec.
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "data/tokenizer/load.hpp"
#include "data/tokenizer/protobuf.hpp"
#include "data/tokenizer/sentencepiece.hpp"

namespace capstan::data {

namespace {

using Field = ProtobufReader::Field;

class ModelReader {
 public:
  ModelReader(std::string_view bytes, const std::string& name, TokenizerSpec& spec)
      : bytes_(bytes), name_(name), spec_(spec) {}

  void read() {
    ProtobufReader reader(bytes_, name_);
    Field field;
    while (reader.next(field)) {
      if (field.number == 1)
        read_piece(reader.bytes(field), reader.offset_of(field));
      else if (field.number == 2)
        read_trainer(reader.bytes(field), reader.offset_of(field));
      else if (field.number == 3)
        read_normalizer(reader.bytes(field), reader.offset_of(field), false);
      else if (field.number == 5)
        read_normalizer(reader.bytes(field), reader.offset_of(field), true);
    }
    if (spec_.vocab.empty())
      fail(ErrorCode::format, name_ + ": there are no pieces: this is no SentencePiece model");
    finish();
  }

 private:
  void read_piece(std::string_view bytes, uint64_t offset) {
    ProtobufReader reader(bytes, name_, offset);
    Field field;
    std::string_view text;
    float score = 0;
    int64_t type = 1;
    while (reader.next(field)) {
      if (field.number == 1) text = reader.bytes(field);
      if (field.number == 2) score = reader.number(field);
      if (field.number == 3) type = reader.integer(field);
    }
    const auto id = static_cast<int32_t>(spec_.vocab.size());
    const std::string place = name_ + ": pieces[" + std::to_string(id) + "]";
    if (text.empty()) fail(ErrorCode::format, place + ": the piece is empty");
    if (first_invalid_utf8(text)) fail(ErrorCode::format, place + ": the piece is not UTF-8");
    if (!std::isfinite(score)) fail(ErrorCode::format, place + ": the score is not a number");
    constexpr PieceKind kKinds[] = {PieceKind::ordinary,     PieceKind::unknown, PieceKind::control,
                                    PieceKind::user_defined, PieceKind::unused,  PieceKind::byte};
    if (type < 1 || type > 6) fail(ErrorCode::format, place + ": there is no type " + std::to_string(type));
    const PieceKind kind = kKinds[type - 1];
    if (kind == PieceKind::byte && byte_of_fallback(text) < 0)
      fail(ErrorCode::format, place + ": " + capstan::quoted(text) + " is no byte");
    if (kind == PieceKind::unknown) {
      if (spec_.unknown)
        fail(ErrorCode::format, place + ": there are two unknown pieces, " + capstan::quoted(*spec_.unknown) +
                                    " and " + capstan::quoted(text));
      spec_.unknown = text;
    }
    spec_.vocab.emplace_back(text, id);
    spec_.scores.push_back(static_cast<double>(score));
    spec_.kinds.push_back(kind);
  }

  void read_trainer(std::string_view bytes, uint64_t offset) {
    ProtobufReader reader(bytes, name_, offset);
    Field field;
    while (reader.next(field)) switch (field.number) {
        case 3:
          type_ = reader.integer(field);
          break;
        case 24:
          normalizer_.space_as_suffix = reader.boolean(field);
          break;
        case 35:
          spec_.byte_fallback = reader.boolean(field);
          break;
        case 41:
          bos_ = reader.integer(field);
          break;
        case 42:
          eos_ = reader.integer(field);
          break;
        case 43:
          pad_ = reader.integer(field);
          break;
        case 44:
          unknown_surface_ = reader.bytes(field);
          if (unknown_surface_.size() > 1024 || first_invalid_utf8(unknown_surface_))
            fail(ErrorCode::format,
                 name_ + ": trainer_spec.unk_surface: expected UTF-8 of at most 1024 bytes");
          break;
        default:
          break;
      }
  }

  void read_normalizer(std::string_view bytes, uint64_t offset, bool of_output) {
    ProtobufReader reader(bytes, name_, offset);
    Field field;
    while (reader.next(field)) {
      if (field.number == 2 && !reader.bytes(field).empty()) {
        if (of_output)
          fail(ErrorCode::unsupported, name_ + ": denormalizer_spec: a table for decoding is not supported");
        normalizer_.charsmap = std::make_shared<const Charsmap>(
            reader.bytes(field), name_ + ": normalizer_spec.precompiled_charsmap");
      }
      if (of_output) continue;
      if (field.number == 3) normalizer_.add_dummy_prefix = reader.boolean(field);
      if (field.number == 4) normalizer_.remove_extra_spaces = reader.boolean(field);
      if (field.number == 5) normalizer_.escape_spaces = reader.boolean(field);
    }
  }

  void finish() {
    if (type_ != 1 && type_ != 2)
      fail(ErrorCode::unsupported,
           name_ + ": trainer_spec.model_type: " +
               (type_ == 3   ? "WORD"
                : type_ == 4 ? "CHAR"
                             : std::to_string(type_)) +
               " is not supported",
           "supported here: UNIGRAM, BPE");
    spec_.model =
        type_ == 1 ? TokenizerSpec::ModelKind::unigram : TokenizerSpec::ModelKind::sentencepiece_bpe;
    if (!spec_.unknown) fail(ErrorCode::format, name_ + ": no piece is of the type UNKNOWN");
    size_t bytes = 0;
    std::vector<std::pair<std::string_view, int32_t>> user_defined;
    for (size_t id = 0; id < spec_.kinds.size(); ++id) {
      if (spec_.kinds[id] == PieceKind::byte) ++bytes;
      if (spec_.kinds[id] == PieceKind::user_defined) user_defined.push_back(spec_.vocab[id]);
    }
    if (bytes != (spec_.byte_fallback ? 256 : 0))
      fail(ErrorCode::format, name_ + ": there are " + std::to_string(bytes) +
                                  " pieces for bytes, but trainer_spec.byte_fallback is " +
                                  (spec_.byte_fallback ? "true" : "false"));
    normalizer_.user_defined = std::make_shared<const ByteTrie>(std::move(user_defined));
    spec_.normalizers.push_back(sentencepiece_step(normalizer_));
    Decoder& decoder = spec_.decoder.emplace();
    decoder.steps.emplace_back();
    decoder.steps[0].kind = DecoderStep::Kind::sentencepiece;
    decoder.kinds = spec_.kinds;
    decoder.unknown_surface = unknown_surface_;
    decoder.strip_first_space = normalizer_.add_dummy_prefix || normalizer_.remove_extra_spaces;
    decoder.strip_all_first_spaces = normalizer_.remove_extra_spaces;
    const auto named = [&](int64_t id, std::optional<std::string>& name) {
      if (id >= 0 && id < static_cast<int64_t>(spec_.vocab.size()) &&
          spec_.kinds[static_cast<size_t>(id)] == PieceKind::control)
        name = spec_.vocab[static_cast<size_t>(id)].first;
    };
    named(bos_, spec_.bos);
    named(eos_, spec_.eos);
    named(pad_, spec_.pad);
  }

  std::string_view bytes_;
  const std::string& name_;
  TokenizerSpec& spec_;
  int64_t type_ = 1, bos_ = 1, eos_ = 2, pad_ = -1;
  std::string unknown_surface_ = " \xE2\x81\x87 ";
  SentencePieceNormalizer normalizer_;
};

}  // namespace

LoadedSpec read_sentencepiece(std::string model, const std::string& name, std::string config,
                              std::string config_name) {
  LoadedSpec result;
  TokenizerSpec& spec = result.spec;
  result.lines = std::make_unique<const std::string>(std::move(model));
  spec.vocab_place = spec.added_place = name + ": pieces";
  ModelReader(*result.lines, name, spec).read();
  if (config.empty()) return result;
  result.documents.push_back(std::make_unique<JsonFile>(std::move(config), std::move(config_name)));
  const JsonFile& settings = *result.documents.back();
  read_added_tokens_decoder(settings, spec);
  // The classes that put tokens around a text without being told.
  const std::string_view kind =
      settings.text_or(settings.object(settings.root(), ""), "", "tokenizer_class", "");
  if (kind.starts_with("LlamaTokenizer") || kind.starts_with("CodeLlamaTokenizer") ||
      kind.starts_with("GemmaTokenizer"))
    spec.add_bos = true;
  if (kind.starts_with("T5Tokenizer")) spec.add_eos = true;
  return result;
}

}  // namespace capstan::data

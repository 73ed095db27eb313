// SentencePiece's ModelProto → SentencePieceModel → TokenizerSpec.
#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/load.hpp"
#include "text/tokenizer/protobuf.hpp"
#include "text/tokenizer/sentencepiece_model.hpp"

namespace capstan::text {

namespace {

using Field = ProtobufReader::Field;

class ModelReader {
 public:
  ModelReader(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  SentencePieceModel read() {
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
    if (model_.pieces.empty())
      fail(ErrorCode::format, name_ + ": there are no pieces: this is not a SentencePiece model");
    check();
    return std::move(model_);
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
    const std::string location = name_ + ": pieces[" + std::to_string(model_.pieces.size()) + "]";
    if (text.empty()) fail(ErrorCode::format, location + ": the piece is empty");
    if (first_invalid_utf8(text)) fail(ErrorCode::format, location + ": the piece is not UTF-8");
    if (!std::isfinite(score)) fail(ErrorCode::format, location + ": the score is not a number");
    constexpr PieceKind kKinds[] = {PieceKind::ordinary,     PieceKind::unknown, PieceKind::control,
                                    PieceKind::user_defined, PieceKind::unused,  PieceKind::byte};
    if (type < 1 || type > 6)
      fail(ErrorCode::format, location + ": there is no type " + std::to_string(type));
    const PieceKind kind = kKinds[type - 1];
    if (kind == PieceKind::byte && byte_of_fallback(text) < 0)
      fail(ErrorCode::format, location + ": " + in_quotes(text) + " is not a byte");
    if (kind == PieceKind::unknown) {
      if (!unknown_.empty())
        fail(ErrorCode::format,
             location + ": there are two unknown pieces, " + in_quotes(unknown_) + " and " + in_quotes(text));
      unknown_ = text;
    }
    model_.pieces.push_back({text, static_cast<double>(score), kind});
  }

  void read_trainer(std::string_view bytes, uint64_t offset) {
    ProtobufReader reader(bytes, name_, offset);
    Field field;
    while (reader.next(field)) switch (field.number) {
        case 3:
          type_ = reader.integer(field);
          break;
        case 24:
          model_.normalizer.space_as_suffix = reader.boolean(field);
          break;
        case 35:
          model_.byte_fallback = reader.boolean(field);
          break;
        case 41:
          model_.bos = reader.integer(field);
          break;
        case 42:
          model_.eos = reader.integer(field);
          break;
        case 43:
          model_.pad = reader.integer(field);
          break;
        case 44:
          model_.unknown_surface = reader.bytes(field);
          if (model_.unknown_surface.size() > 1024 || first_invalid_utf8(model_.unknown_surface))
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
        model_.normalizer.charsmap = std::make_shared<const Charsmap>(
            reader.bytes(field), name_ + ": normalizer_spec.precompiled_charsmap");
      }
      if (of_output) continue;
      if (field.number == 3) model_.normalizer.add_dummy_prefix = reader.boolean(field);
      if (field.number == 4) model_.normalizer.remove_extra_spaces = reader.boolean(field);
      if (field.number == 5) model_.normalizer.escape_spaces = reader.boolean(field);
    }
  }

  void check() {
    if (type_ != 1 && type_ != 2)
      fail(ErrorCode::unsupported,
           name_ + ": trainer_spec.model_type: " +
               (type_ == 3   ? "WORD"
                : type_ == 4 ? "CHAR"
                             : std::to_string(type_)) +
               " is not supported",
           "supported here: UNIGRAM, BPE");
    model_.algorithm =
        type_ == 1 ? SentencePieceModel::Algorithm::unigram : SentencePieceModel::Algorithm::bpe;
    if (unknown_.empty()) fail(ErrorCode::format, name_ + ": no piece is of the type UNKNOWN");
    const auto bytes = std::count_if(model_.pieces.begin(), model_.pieces.end(),
                                     [](const auto& piece) { return piece.kind == PieceKind::byte; });
    if (bytes != (model_.byte_fallback ? 256 : 0))
      fail(ErrorCode::format, name_ + ": there are " + std::to_string(bytes) +
                                  " pieces for bytes, but trainer_spec.byte_fallback is " +
                                  (model_.byte_fallback ? "true" : "false"));
  }

  std::string_view bytes_;
  const std::string& name_;
  SentencePieceModel model_;
  int64_t type_ = 1;
  std::string_view unknown_;
};

void describe(SentencePieceModel model, TokenizerSpec& spec) {
  spec.model = model.algorithm == SentencePieceModel::Algorithm::unigram
                   ? TokenizerSpec::ModelKind::unigram
                   : TokenizerSpec::ModelKind::sentencepiece_bpe;
  spec.byte_fallback = model.byte_fallback;
  std::vector<std::pair<std::string_view, int32_t>> user_defined;
  for (const SentencePieceModel::Piece& piece : model.pieces) {
    spec.vocab.emplace_back(piece.text, static_cast<int32_t>(spec.vocab.size()));
    spec.scores.push_back(piece.score);
    spec.kinds.push_back(piece.kind);
    if (piece.kind == PieceKind::unknown) spec.unknown = piece.text;
    if (piece.kind == PieceKind::user_defined) user_defined.push_back(spec.vocab.back());
  }
  model.normalizer.user_defined = std::make_shared<const ByteTrie>(std::move(user_defined));
  spec.normalizers.push_back(sentencepiece_step(model.normalizer));
  Decoder& decoder = spec.decoder.emplace();
  decoder.steps.emplace_back();
  decoder.steps[0].kind = DecoderStep::Kind::sentencepiece;
  decoder.kinds = spec.kinds;
  decoder.unknown_surface = model.unknown_surface;
  decoder.strip_first_space = model.normalizer.add_dummy_prefix || model.normalizer.remove_extra_spaces;
  decoder.strip_all_first_spaces = model.normalizer.remove_extra_spaces;
  const auto named = [&](int64_t id, std::optional<std::string>& name) {
    if (const std::string_view text = model.control(id); !text.empty()) name = text;
  };
  named(model.bos, spec.bos);
  named(model.eos, spec.eos);
  named(model.pad, spec.pad);
}

}  // namespace

std::string_view SentencePieceModel::control(int64_t id) const {
  if (id < 0 || id >= static_cast<int64_t>(pieces.size())) return {};
  const Piece& piece = pieces[static_cast<size_t>(id)];
  return piece.kind == PieceKind::control ? piece.text : std::string_view();
}

SentencePieceModel read_sentencepiece_model(std::string_view bytes, const std::string& name) {
  return ModelReader(bytes, name).read();
}

LoadedSpec read_sentencepiece(std::string model, const std::string& name, std::string config,
                              std::string config_name) {
  LoadedSpec result;
  TokenizerSpec& spec = result.spec;
  result.lines = std::make_unique<const std::string>(std::move(model));
  spec.vocab_location = spec.added_location = name + ": pieces";
  describe(read_sentencepiece_model(*result.lines, name), spec);
  if (config.empty()) return result;
  const JsonNode settings = result.add_document(std::move(config), std::move(config_name)).root();
  read_added_tokens_decoder(settings, spec);
  // These tokenizer classes add special tokens by default.
  const std::string_view kind = settings.text("tokenizer_class", "");
  if (kind.starts_with("LlamaTokenizer") || kind.starts_with("CodeLlamaTokenizer") ||
      kind.starts_with("GemmaTokenizer"))
    spec.add_bos = true;
  if (kind.starts_with("T5Tokenizer")) spec.add_eos = true;
  return result;
}

}  // namespace capstan::text

// Converts a tokenizer.json or a SentencePiece model to llama.cpp's metadata, as the equivalent one of its
// two kinds of BPE. A tokenizer without an equivalent is an error.
#include <algorithm>
#include <map>
#include <unordered_set>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "formats/config_json.hpp"
#include "formats/gguf_tokenizer.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "text/chat/generation_tags.hpp"
#include "text/tokenizer/sentencepiece_model.hpp"
#include "text/tokenizer/text_pieces.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::formats {

using Kind = GgufValue::Kind;

namespace {

using Entries = std::vector<std::pair<std::string, GgufValue>>;

const std::string kFile = "tokenizer.json", kSentencePieceFile = "tokenizer.model";
const char* const kConfig = "tokenizer_config.json";

[[noreturn]] void unsupported(const std::string& what, const std::string& file = kFile) {
  fail(ErrorCode::unsupported, file + ": " + what + ": a GGUF file cannot hold this tokenizer",
       "hf:DIRECTORY takes the files of the tokenizer as they are");
}

void add(Entries& entries, const std::string& key, GgufValue value) {
  entries.emplace_back("tokenizer.ggml." + key, std::move(value));
}

// Tokens and their types by id. Ids that no token has are filled as llama.cpp's converter fills them.
struct TokenList {
  explicit TokenList(int64_t rows, std::string from) : file(std::move(from)) {
    tokens.kind = Kind::texts;
    types.kind = Kind::integers;
    for (int64_t i = 0; i < rows; ++i) tokens.texts.push_back("[PAD" + std::to_string(i) + "]");
    types.integers.assign(static_cast<size_t>(rows), kUnused);
  }
  void put(const std::string& token, int64_t id, int64_t type) {
    const auto rows = static_cast<int64_t>(tokens.texts.size());
    if (id >= rows)
      unsupported(
          "the token " + in_quotes(token) + " has id " + std::to_string(id) + " of " + std::to_string(rows),
          file);
    tokens.texts[static_cast<size_t>(id)] = token;
    types.integers[static_cast<size_t>(id)] = type;
    ids[token] = id;
  }

  std::string file;
  GgufValue tokens, types;
  std::map<std::string, int64_t, std::less<>> ids;
};

// A stage is nothing, one step, or a Sequence of them.
std::vector<ConfigJson> steps_of(ConfigJson& top, const char* stage, const char* list) {
  const Json& value = top.value(stage);
  if (value.is_null()) return {};
  ConfigJson one(value, top.location() + ": " + stage);
  if (one.text("type") != "Sequence") return {one};
  std::vector<ConfigJson> steps;
  for (const JsonView& step : JsonView(one.value(list), one.location(), list).items())
    steps.emplace_back(step.object(), one.location() + "[" + std::to_string(steps.size()) + "]");
  return steps;
}

std::string pattern_of(ConfigJson& step, const char* kind) {
  ConfigJson pattern(step.value("pattern"), step.location() + ": pattern");
  return pattern.text(kind, "");
}

// ---- `gpt2`: bytes, split by a regular expression that llama.cpp selects by name ----

std::string pre_tokenizer_name(ConfigJson& top, bool ignores_merges) {
  // llama.cpp does not normalize to NFC. This makes no difference for text in NFC, and all of Qwen's files
  // ask for it.
  for (ConfigJson& step : steps_of(top, "normalizer", "normalizers"))
    if (const std::string type = step.text("type"); type != "NFC")
      unsupported("a normalizer of type " + in_quotes(type));
  bool digits = false, bytes = false, own_pattern = false;
  std::string pattern;
  for (ConfigJson& step : steps_of(top, "pre_tokenizer", "pretokenizers")) {
    const std::string type = step.text("type");
    const bool first = !digits && !bytes && pattern.empty();
    if (type == "Digits" && first && step.boolean("individual_digits", false)) {
      digits = true;
    } else if (type == "Split" && first &&
               step.text("behavior") == (step.boolean("invert", false) ? "Removed" : "Isolated")) {
      // The behavior does not matter, because every character is in a match of each expression below.
      pattern = pattern_of(step, "Regex");
      if (pattern.empty()) unsupported("a Split at a text");
    } else if (type == "ByteLevel" && !bytes && !step.boolean("add_prefix_space", true)) {
      bytes = true;
      own_pattern = step.boolean("use_regex", true);
    } else {
      unsupported("the " + type + " of its `pre_tokenizer` is set or placed as none of llama.cpp's");
    }
  }
  if (!bytes) unsupported("a `pre_tokenizer` without ByteLevel");
  if (own_pattern && !pattern.empty()) unsupported("a `pre_tokenizer` that splits with two expressions");
  if (own_pattern) pattern = text::kGpt2Pattern;
  for (const PreTokenizer& one : kPreTokenizers) {
    if (one.digits == digits && one.ignores_merges == ignores_merges &&
        pattern == (one.pattern ? *one.pattern : text::kGpt2Pattern))
      return one.name;
  }
  unsupported("a `pre_tokenizer` that splits with an expression that, with `ignore_merges` " +
              std::string(ignores_merges ? "true" : "false") + ", llama.cpp has no name for");
}

// ---- `llama`: characters with ▁ for spaces, and bytes for characters outside of the vocabulary ----

// Returns true if a space is prepended to the text.
bool read_blanks(ConfigJson& top) {
  bool replaced = false, before = false;
  for (ConfigJson& step : steps_of(top, "normalizer", "normalizers")) {
    const std::string type = step.text("type");
    if (type == "Prepend" && step.text("prepend") == text::kMetaspace)
      before = true;
    else if (type == "Replace" && pattern_of(step, "String") == " " &&
             step.text("content") == text::kMetaspace)
      replaced = true;
    else
      unsupported("the " + type + " of its `normalizer` is none of llama.cpp's");
  }
  for (ConfigJson& step : steps_of(top, "pre_tokenizer", "pretokenizers")) {
    const std::string type = step.text("type");
    // Gemma's step splits at spaces, of which none is left.
    if (type == "Split" && replaced && pattern_of(step, "String") == " ") continue;
    if (type != "Metaspace" || step.text("replacement") != text::kMetaspace || step.boolean("split", true))
      unsupported("the " + type + " of its `pre_tokenizer` is none of llama.cpp's");
    // Older files have this key.
    const bool added = step.boolean("add_prefix_space", true);
    const std::string scheme = step.text("prepend_scheme", added ? "always" : "never");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      unsupported("a `prepend_scheme` " + in_quotes(scheme));
    before = before || scheme != "never";
    replaced = true;
  }
  if (!replaced) unsupported("blanks that stay blanks");
  return before;
}

// llama.cpp merges any two tokens that form a token, the best one first, whereas a tokenizer.json merges
// listed pairs only. Converters of SentencePiece models list nearly all possible pairs.
void check_all_ways(const std::vector<std::string>& tokens, const std::vector<int64_t>& types,
                    const std::vector<std::string>& merges) {
  std::unordered_set<std::string_view> normal;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (types[i] == kNormal) normal.insert(tokens[i]);
  const std::unordered_set<std::string_view> listed(merges.begin(), merges.end());
  size_t ways = 0, missing = 0;
  std::string way;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    if (types[i] != kNormal || token.size() > 256) continue;
    for (size_t at = 1; at < token.size(); ++at) {
      if (!normal.count(token.substr(0, at)) || !normal.count(token.substr(at))) continue;
      ++ways;
      way.assign(token.substr(0, at)).append(" ").append(token.substr(at));
      missing += listed.count(way) == 0;
    }
  }
  if (missing * 100 > ways)
    unsupported("`merges` lack " + std::to_string(missing) + " of the " + std::to_string(ways) +
                " ways in which two tokens make a third, and llama.cpp takes them all");
}

// ---- both ----

// Returns true if the post-processor prepends a token.
bool puts_token_before(const Json& step) {
  if (!step.is_object()) return false;
  const auto list = [&](const char* key) -> const Json& {
    static const Json kNone = Json::array();
    const auto found = step.find(key);
    return found != step.end() && found->is_array() ? *found : kNone;
  };
  for (const Json& part : list("processors"))
    if (puts_token_before(part)) return true;
  const Json& single = list("single");
  return !single.empty() && single[0].is_object() && single[0].contains("SpecialToken");
}

// The ids of generation_config.json: bos and eos where tokenizer_config.json names none, and further ends of
// a text as the end of a turn (eot) and of a message (eom), at which llama.cpp stops as at eos.
void add_ends(std::string_view generation, int64_t rows, std::map<std::string, int64_t>& special) {
  const Json settings = generation.empty() ? Json() : json_of(generation, IfNotJson::discard);
  if (!settings.is_object()) return;
  const auto ids_of = [&](const char* key) {
    std::vector<int64_t> ids;
    const Json value = settings.value(key, Json());
    for (const Json& id : value.is_array() ? value : Json::array({value}))
      if (id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < rows)
        ids.push_back(id.get<int64_t>());
    return ids;
  };
  if (const auto bos = ids_of("bos_token_id"); !bos.empty()) special.emplace("bos", bos[0]);
  for (const int64_t id : ids_of("eos_token_id"))
    for (const char* name : {"eos", "eot", "eom"})
      if (special.emplace(name, id).first->second == id) break;
}

Json settings_in(std::string_view config) {
  Json settings = config.empty() ? Json::object() : parse_json(config, kConfig);
  // Checks that it is an object.
  ConfigJson(settings, kConfig);
  return settings;
}

// Adds the metadata of all kinds of tokenizers. special: the ids that the tokenizer names. adds_bos: the
// default if the settings do not give it.
void add_settings(Entries& entries, const Json& settings_json, std::string_view generation,
                  const std::string& chat_template, int64_t rows, std::map<std::string, int64_t> special,
                  bool adds_bos) {
  ConfigJson settings(settings_json, kConfig);
  add_ends(generation, rows, special);
  for (const auto& [name, id] : special) add(entries, name + "_token_id", gguf_integer(id));
  // Always written, because llama.cpp's default depends on the kind.
  add(entries, "add_bos_token", gguf_boolean(settings.boolean("add_bos_token", adds_bos)));
  if (settings.has("add_eos_token"))
    add(entries, "add_eos_token", gguf_boolean(settings.boolean("add_eos_token", false)));
  std::string chat = chat_template;
  if (const Json& own = settings.value("chat_template"); chat.empty() && own.is_string()) chat = own;
  if (!chat.empty())
    entries.emplace_back("tokenizer.chat_template", gguf_text(text::chat::without_generation_tags(chat)));
}

// ---- a SentencePiece model ----

// Refuses what llama.cpp's `llama` tokenizer does not support.
void check_sentencepiece(const text::SentencePieceModel& model) {
  const auto refuse = [](const std::string& what) { unsupported(what, kSentencePieceFile); };
  if (model.algorithm != text::SentencePieceModel::Algorithm::bpe) refuse("a model of the type Unigram");
  if (!model.byte_fallback) refuse("a vocabulary without bytes (trainer_spec.byte_fallback is false)");
  const text::SentencePieceNormalizer& normalizer = model.normalizer;
  if (normalizer.charsmap) refuse("normalizer_spec.precompiled_charsmap, which changes characters");
  if (normalizer.remove_extra_spaces) refuse("normalizer_spec.remove_extra_whitespaces");
  if (!normalizer.escape_spaces) refuse("normalizer_spec.escape_whitespaces is false");
  if (normalizer.space_as_suffix) refuse("trainer_spec.treat_whitespace_as_suffix");
  std::unordered_set<std::string_view> joins;
  for (const auto& piece : model.pieces)
    if (piece.kind != text::PieceKind::control && piece.kind != text::PieceKind::unknown &&
        piece.kind != text::PieceKind::byte)
      joins.insert(piece.text);
  for (const auto& piece : model.pieces) {
    // SentencePiece splits such a piece again.
    if (piece.kind == text::PieceKind::unused)
      for (size_t at = 1; at < piece.text.size(); ++at)
        if (joins.count(piece.text.substr(0, at)) && joins.count(piece.text.substr(at)))
          refuse("the unused piece " + in_quotes(piece.text) + " is made of two others");
    // User-defined pieces are found before spaces become ▁.
    if (piece.kind == text::PieceKind::user_defined &&
        piece.text.find(text::kMetaspace) != std::string_view::npos)
      refuse("the user-defined piece " + in_quotes(piece.text) + " holds a blank");
  }
}

int64_t type_of(text::PieceKind kind) {
  switch (kind) {
    case text::PieceKind::ordinary:
      return kNormal;
    case text::PieceKind::unknown:
      return kUnknown;
    case text::PieceKind::control:
      return kControl;
    case text::PieceKind::user_defined:
      return kUser;
    case text::PieceKind::unused:
      return kUnused;
    case text::PieceKind::byte:
      return kByte;
  }
  return kNormal;
}

}  // namespace

std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer(std::string_view tokenizer_json,
                                                              std::string_view config,
                                                              std::string_view generation,
                                                              const std::string& chat_template,
                                                              int64_t rows) {
  const Json parsed = parse_json(tokenizer_json, kFile);
  const JsonView view(parsed, kFile), model_view = view.at("model");
  ConfigJson top(parsed, kFile), model(model_view.object(), kFile + ": model");
  if (const std::string type = model.text("type", "BPE"); type != "BPE")
    unsupported("a model of type " + in_quotes(type));
  if (model.number("dropout", 0) != 0) unsupported("merges that are dropped at random");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.text(key, "").empty()) unsupported("a `" + std::string(key) + "`");
  const bool fallback = model.boolean("byte_fallback", false);
  const bool ignores_merges = model.boolean("ignore_merges", false);
  const std::string unknown_token = model.text("unk_token", "");

  TokenList list(rows, kFile);
  GgufValue scores, merges;
  merges.kind = Kind::texts;
  scores.kind = Kind::reals;
  const JsonView vocabulary = model_view.at("vocab");
  for (const auto& [token, id] : vocabulary.object().items()) {
    const bool byte = fallback && token.size() == 6 && token.starts_with("<0x") && token.ends_with(">");
    list.put(token, vocabulary.item(token, id).count(),
             byte                     ? kByte
             : token == unknown_token ? kUnknown
                                      : kNormal);
  }
  if (top.has("added_tokens"))
    for (const JsonView& one : view.at("added_tokens").items()) {
      const std::string& token = one.at("content").string();
      const bool special = one.object().contains("special") && one.at("special").boolean();
      list.put(token, one.at("id").count(), token == unknown_token ? kUnknown : special ? kControl : kUser);
    }
  const JsonView listed = model_view.at("merges");
  double rank = 0;
  std::map<std::string, double, std::less<>> made;
  for (const Json& merge : listed.array()) {
    std::string left, right;
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      const size_t blank = line.find(' ', 1);
      if (blank == std::string::npos) listed.refuse("has a line that is not two tokens");
      left = line.substr(0, blank), right = line.substr(blank + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0], right = merge[1];
    } else {
      listed.refuse("has an item that is not two tokens");
    }
    made.emplace(left + right, -++rank);
    merges.texts.push_back(left + " " + right);
  }

  Entries result;
  if (fallback) {
    const bool before = read_blanks(top);
    check_all_ways(list.tokens.texts, list.types.integers, merges.texts);
    add(result, "model", gguf_text("llama"));
    add(result, "pre", gguf_text("default"));
    // Pieces that no merge forms come last.
    for (const std::string& token : list.tokens.texts) {
      const auto found = made.find(token);
      scores.reals.push_back(found == made.end() ? -rank - 1 : found->second);
    }
    add(result, "tokens", std::move(list.tokens));
    add(result, "scores", std::move(scores));
    add(result, "token_type", std::move(list.types));
    add(result, "add_space_prefix", gguf_boolean(before));
  } else {
    const std::string pre = pre_tokenizer_name(top, ignores_merges);
    add(result, "model", gguf_text("gpt2"));
    add(result, "pre", gguf_text(pre));
    add(result, "tokens", std::move(list.tokens));
    add(result, "token_type", std::move(list.types));
    add(result, "merges", std::move(merges));
  }

  const Json settings = settings_in(config);
  std::map<std::string, int64_t> special;
  for (const auto& [theirs, ours] : {std::pair{"bos", "bos_token"}, std::pair{"eos", "eos_token"},
                                     std::pair{"unknown", "unk_token"}, std::pair{"padding", "pad_token"}}) {
    Json token = settings.value(ours, Json());
    if (token.is_object()) token = token.value("content", Json());
    if (!token.is_string()) continue;
    if (const auto id = list.ids.find(token.get_ref<const std::string&>()); id != list.ids.end())
      special[theirs] = id->second;
  }
  add_settings(result, settings, generation, chat_template, rows, std::move(special),
               puts_token_before(top.value("post_processor")));
  return result;
}

std::vector<std::pair<std::string, GgufValue>> gguf_sentencepiece(
    const std::vector<std::pair<std::string, std::string>>& files, int64_t rows) {
  const auto text = [&](std::string_view name) -> std::string_view {
    const auto found =
        std::find_if(files.begin(), files.end(), [&](const auto& file) { return file.first == name; });
    return found == files.end() ? std::string_view() : found->second;
  };
  const text::SentencePieceModel model =
      text::read_sentencepiece_model(text(kSentencePieceFile), kSentencePieceFile);
  check_sentencepiece(model);
  TokenList list(rows, kSentencePieceFile);
  double lowest = 0;
  for (const auto& piece : model.pieces) {
    list.put(std::string(piece.text), static_cast<int64_t>(&piece - model.pieces.data()),
             type_of(piece.kind));
    lowest = std::min(lowest, piece.score);
  }
  GgufValue scores;
  scores.kind = Kind::reals;
  scores.reals.assign(static_cast<size_t>(rows), lowest - 1);
  for (size_t i = 0; i < model.pieces.size(); ++i) scores.reals[i] = model.pieces[i].score;

  const Json settings = settings_in(text(kConfig));
  const auto tokenizer = text::Tokenizer::from_texts(files, "the model");
  if (const Json added = settings.value("added_tokens_decoder", Json()); added.is_object())
    for (const auto& [id, flags] : added.items()) {
      const int64_t row = parse_int(id).value_or(-1);
      // Loading the tokenizer has refused this already.
      if (row < 0 || !flags.is_object()) continue;
      const bool unknown = row < static_cast<int64_t>(model.pieces.size()) &&
                           model.pieces[static_cast<size_t>(row)].kind == text::PieceKind::unknown;
      list.put(std::string(tokenizer->token_of(static_cast<int32_t>(row))), row,
               unknown                         ? kUnknown
               : flags.value("special", false) ? kControl
                                               : kUser);
    }

  Entries result;
  add(result, "model", gguf_text("llama"));
  add(result, "pre", gguf_text("default"));
  add(result, "tokens", std::move(list.tokens));
  add(result, "scores", std::move(scores));
  add(result, "token_type", std::move(list.types));
  add(result, "add_space_prefix", gguf_boolean(model.normalizer.add_dummy_prefix));
  std::map<std::string, int64_t> special;
  for (const auto& [name, id] :
       {std::pair{"bos", tokenizer->bos()}, std::pair{"eos", tokenizer->eos()},
        std::pair{"unknown", tokenizer->unk()}, std::pair{"padding", tokenizer->pad()}})
    if (id) special[name] = *id;
  add_settings(result, settings, text("generation_config.json"), std::string(text("chat_template.jinja")),
               rows, std::move(special), !tokenizer->before().empty());
  return result;
}

}  // namespace capstan::formats

#include "text/tokenizer/load.hpp"

#include "base/text.hpp"
#include "text/tokenizer/load_stages.hpp"
#include "text/tokenizer/split_steps.hpp"

namespace capstan::text {

namespace {

using simdjson::dom::element;
using simdjson::dom::object;

void read_flags(const JsonFile& file, object fields, const std::string& path, AddedToken& token) {
  token.single_word = file.boolean_or(fields, path, "single_word", false);
  token.lstrip = file.boolean_or(fields, path, "lstrip", false);
  token.rstrip = file.boolean_or(fields, path, "rstrip", false);
  token.special = file.boolean_or(fields, path, "special", false);
  token.normalized = file.boolean_or(fields, path, "normalized", !token.special);
}

class TokenizerJson {
 public:
  TokenizerJson(const JsonFile& file, TokenizerSpec& spec) : file_(file), spec_(spec) {}

  void read() {
    const object root = file_.object(file_.root(), "");
    if (const auto version = file_.member(root, "version"))
      if (file_.text(*version, "version") != "1.0")
        file_.fail_at("version", "expected \"1.0\", got " + quoted(file_.text(*version, "version")),
                      ErrorCode::unsupported);
    const auto model = file_.member(root, "model");
    if (!model) file_.fail_at("", "there is no `model`: this is not a tokenizer.json");
    // "truncation" and "padding" are about batches of a model's inputs; encode() never cuts or pads.
    read_added(root);
    read_stages(file_, spec_);
    read_model(*model);
  }

 private:
  void read_added(object root) {
    spec_.added_place = file_.name() + ": added_tokens";
    const auto list = file_.member(root, "added_tokens");
    if (!list) return;
    size_t index = 0;
    for (const element value : file_.array(*list, "added_tokens")) {
      const std::string path = child("added_tokens", index++);
      const object fields = file_.object(value, path);
      AddedToken token;
      const auto id = file_.member(fields, "id");
      const auto content = file_.member(fields, "content");
      if (!id || !content) file_.fail_at(path, "`id` and `content` are needed");
      token.id = file_.token_id(*id, child(path, "id"));
      token.content = file_.text(*content, child(path, "content"));
      read_flags(file_, fields, path, token);
      spec_.added.push_back(std::move(token));
    }
  }

  void read_model(element value) {
    const std::string path = "model";
    object fields;
    if (value.get(fields))
      file_.fail_at(path, "expected an object, got " + std::string(json_type_name(value)));
    const auto vocab = file_.member(fields, "vocab");
    // Older files do not name the type.
    const std::string_view otherwise = vocab && vocab->is_array()                         ? "Unigram"
                                       : file_.member(fields, "max_input_chars_per_word") ? "WordPiece"
                                                                                          : "BPE";
    const std::string_view type = file_.text_or(fields, path, "type", otherwise);
    if (type != "BPE" && type != "Unigram" && type != "WordPiece")
      file_.fail_unknown(child(path, "type"), "model", type, "BPE, Unigram, WordPiece");
    file_.object(value, path);
    if (!vocab) file_.fail_at(path, "there is no `vocab`");
    spec_.vocab_place = file_.name() + ": model.vocab";
    spec_.byte_fallback = file_.boolean_or(fields, path, "byte_fallback", false);
    if (type == "Unigram") {
      spec_.model = TokenizerSpec::ModelKind::unigram;
      read_scores(fields, *vocab);
      return;
    }
    read_vocab(*vocab);
    if (const auto token = file_.member(fields, "unk_token"))
      spec_.unknown = file_.text(*token, "model.unk_token");
    if (type == "WordPiece") {
      spec_.model = TokenizerSpec::ModelKind::word_piece;
      spec_.prefix = file_.text_or(fields, path, "continuing_subword_prefix", "##");
      if (!spec_.unknown) spec_.unknown = "[UNK]";
      if (const auto most = file_.member(fields, "max_input_chars_per_word"))
        spec_.most_characters = file_.integer(*most, "model.max_input_chars_per_word");
      if (spec_.most_characters < 0)
        file_.fail_at("model.max_input_chars_per_word", "the number is out of range");
      return;
    }
    if (const auto dropout = file_.member(fields, "dropout")) {
      double rate = 0;
      if (dropout->get(rate) || rate != 0)
        file_.fail_at("model.dropout", "merges that are dropped at random are not supported",
                      ErrorCode::unsupported);
    }
    spec_.prefix = file_.text_or(fields, path, "continuing_subword_prefix", "");
    spec_.suffix = file_.text_or(fields, path, "end_of_word_suffix", "");
    spec_.fuse_unknown = file_.boolean_or(fields, path, "fuse_unk", false);
    spec_.ignore_merges = file_.boolean_or(fields, path, "ignore_merges", false);
    spec_.merges_place = file_.name() + ": model.merges";
    size_t index = 0;
    for (const element merge : file_.array(file_.needed(fields, path, "merges"), "model.merges"))
      read_merge(merge, index++);
  }

  void read_vocab(element vocab) {
    object entries;
    if (vocab.get(entries))
      file_.fail_at("model.vocab", "expected an object, got " + std::string(json_type_name(vocab)));
    for (const auto field : entries) {
      if (!field.value.is_int64() || int64_t{field.value} < 0 || int64_t{field.value} > INT32_MAX - 1)
        file_.token_id(field.value, "model.vocab[" + quoted(field.key) + "]");
      spec_.vocab.emplace_back(field.key, static_cast<int32_t>(int64_t{field.value}));
    }
  }

  // Unigram: [["piece", score], …], the id is the place.
  void read_scores(object fields, element vocab) {
    for (const element entry : file_.array(vocab, "model.vocab")) {
      const auto id = static_cast<int32_t>(spec_.vocab.size());
      simdjson::dom::array pair;
      double score = 0;
      if (entry.get(pair) || pair.size() != 2 || !pair.at(0).is_string() || pair.at(1).get(score))
        file_.fail_at(child("model.vocab", static_cast<size_t>(id)), "expected a token and its score");
      spec_.vocab.emplace_back(std::string_view(pair.at(0)), id);
      spec_.scores.push_back(score);
    }
    const auto unknown = file_.member(fields, "unk_id");
    if (!unknown) return;
    const int32_t id = file_.token_id(*unknown, "model.unk_id");
    if (static_cast<size_t>(id) >= spec_.vocab.size())
      file_.fail_at("model.unk_id", "the id " + std::to_string(id) + " is not in the vocabulary of " +
                                        std::to_string(spec_.vocab.size()) + " tokens");
    spec_.unknown = spec_.vocab[static_cast<size_t>(id)].first;
  }

  void read_merge(element merge, size_t index) {
    std::string_view line;
    if (merge.get(line) == simdjson::SUCCESS) {  // the older way: "left right"
      if (line.substr(0, 8) == "#version") return;
      const size_t space = line.find(' ');
      if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
        file_.fail_at(child("model.merges", index),
                      "expected two tokens with one space between them, got " + quoted(line));
      spec_.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
      return;
    }
    simdjson::dom::array pair;
    if (merge.get(pair) || pair.size() != 2 || !pair.at(0).is_string() || !pair.at(1).is_string())
      file_.fail_at(child("model.merges", index), "expected a pair of strings");
    spec_.merges.emplace_back(std::string_view(pair.at(0)), std::string_view(pair.at(1)));
  }

  const JsonFile& file_;
  TokenizerSpec& spec_;
};

// A token's name in a tokenizer_config.json: a string, or an object with "content".
std::optional<std::string> special_name(const JsonFile& file, object fields, std::string_view key) {
  const auto value = file.member(fields, key);
  if (!value) return std::nullopt;
  if (value->is_object()) return std::string(file.text_or(file.object(*value, key), key, "content", ""));
  return std::string(file.text(*value, key));
}

}  // namespace

LoadedSpec read_tokenizer_json(std::string text, std::string name) {
  LoadedSpec result;
  result.documents.push_back(std::make_unique<JsonFile>(std::move(text), std::move(name)));
  TokenizerJson(*result.documents.back(), result.spec).read();
  return result;
}

void read_special_names(const JsonFile& config, TokenizerSpec& spec) {
  const object fields = config.object(config.root(), "");
  const auto take = [&](const char* key, std::optional<std::string>& name) {
    if (auto given = special_name(config, fields, key); given && !given->empty()) name = given;
  };
  take("bos_token", spec.bos);
  take("eos_token", spec.eos);
  take("unk_token", spec.unk);
  take("pad_token", spec.pad);
  if (const auto add = config.member(fields, "add_bos_token"))
    spec.add_bos = config.boolean(*add, "add_bos_token");
  if (const auto add = config.member(fields, "add_eos_token"))
    spec.add_eos = config.boolean(*add, "add_eos_token");
}

void read_added_tokens_decoder(const JsonFile& settings, TokenizerSpec& spec) {
  const auto added = settings.member(settings.object(settings.root(), ""), "added_tokens_decoder");
  if (!added) return;
  spec.added_place = settings.name() + ": added_tokens_decoder";
  for (const auto field : settings.object(*added, "added_tokens_decoder")) {
    const std::string path = child("added_tokens_decoder", field.key);
    const object fields = settings.object(field.value, path);
    const auto id = parse_int(field.key);
    if (!id || *id < 0 || *id > INT32_MAX - 1) settings.fail_at(path, "the id is not a number in range");
    AddedToken token;
    token.id = static_cast<int32_t>(*id);
    token.content = settings.text_or(fields, path, "content", "");
    read_flags(settings, fields, path, token);
    spec.added.push_back(std::move(token));
  }
}

LoadedSpec read_vocab_and_merges(std::string vocab, std::string vocab_name, std::string merges,
                                 std::string merges_name, std::string config, std::string config_name) {
  using Kind = PreTokenizerStep::Kind;
  LoadedSpec result;
  TokenizerSpec& spec = result.spec;
  result.documents.push_back(std::make_unique<JsonFile>(std::move(vocab), std::move(vocab_name)));
  const JsonFile& file = *result.documents.back();
  spec.vocab_place = file.name();
  object entries;
  if (file.root().get(entries))
    file.fail_at("", "expected an object of tokens and ids, got " + std::string(json_type_name(file.root())));
  for (const auto field : entries) {
    const std::string path = "[" + quoted(field.key) + "]";
    const int64_t id = field.value.is_int64() ? int64_t{field.value} : file.integer(field.value, path);
    if (id < 0 || id > INT32_MAX - 1) file.fail_at(path, "the id " + std::to_string(id) + " is out of range");
    spec.vocab.emplace_back(field.key, static_cast<int32_t>(id));
  }

  result.lines = std::make_unique<const std::string>(std::move(merges));
  spec.merges_place = merges_name;
  spec.merges_are_lines = true;
  size_t number = 0;
  for (std::string_view line : split(*result.lines, '\n')) {
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    const size_t space = line.find(' ');
    if (line.empty() || line.substr(0, 8) == "#version") {
      // An empty line keeps its number in messages; the rank does not count it, as in Hugging Face's own
      // reader.
      spec.merges.emplace_back(std::string_view(), std::string_view());
      continue;
    }
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
      fail(ErrorCode::format, merges_name + ":" + std::to_string(number) +
                                  ": expected two tokens with one space between them, got " + quoted(line));
    spec.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }

  PreTokenizerStep step;
  step.kind = Kind::gpt2;
  spec.added_place = file.name();
  const auto add_special = [&](std::string_view content) {
    for (const auto& [token, id] : spec.vocab)
      if (token == content) {
        AddedToken added;
        added.id = id;
        added.content = content;
        added.special = true;
        spec.added.push_back(std::move(added));
      }
  };
  if (config.empty()) {
    add_special("<|endoftext|>");
  } else {
    result.documents.push_back(std::make_unique<JsonFile>(std::move(config), std::move(config_name)));
    const JsonFile& settings = *result.documents.back();
    const object fields = settings.object(settings.root(), "");
    read_special_names(settings, spec);
    std::string_view kind = settings.text_or(fields, "", "tokenizer_class", "GPT2Tokenizer");
    if (kind.size() > 4 && kind.substr(kind.size() - 4) == "Fast") kind.remove_suffix(4);
    if (kind == "Qwen2Tokenizer") {
      step.kind = Kind::qwen2;
      spec.normalizer.nfc = true;
    } else if (kind == "GPT2Tokenizer") {
      step.add_prefix_space = settings.boolean_or(fields, "", "add_prefix_space", false);
    } else {
      fail(ErrorCode::unsupported,
           settings.name() + ": tokenizer_class: " + quoted(kind) +
               " with vocab.json and merges.txt is not supported",
           "supported here: GPT2Tokenizer, Qwen2Tokenizer; any other byte-level one as tokenizer.json");
    }
    read_added_tokens_decoder(settings, spec);
    if (!settings.member(fields, "added_tokens_decoder")) add_special("<|endoftext|>");
  }
  spec.pre_tokenizer.steps.push_back(step);
  spec.byte_level = true;
  spec.splits.push_back(scanner_step(step));
  if (spec.normalizer.nfc) spec.normalizers.push_back(unicode_form_step(UnicodeForm::nfc));
  return result;
}

LoadedSpec read_vocab_lines(std::string vocab, std::string vocab_name, std::string config,
                            std::string config_name) {
  LoadedSpec result;
  TokenizerSpec& spec = result.spec;
  spec.model = TokenizerSpec::ModelKind::word_piece;
  spec.vocab_place = spec.added_place = vocab_name;
  if (vocab.size() > JsonFile::kMaxBytes)
    fail(ErrorCode::format, vocab_name + " has " + std::to_string(vocab.size()) + " bytes; the limit is " +
                                std::to_string(JsonFile::kMaxBytes));
  result.lines = std::make_unique<const std::string>(std::move(vocab));
  auto lines = split(*result.lines, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  for (std::string_view line : lines) {
    while (!line.empty() && (line.back() == ' ' || (line.back() >= 9 && line.back() <= 13)))
      line.remove_suffix(1);
    spec.vocab.emplace_back(line, static_cast<int32_t>(spec.vocab.size()));
  }
  spec.unknown = "[UNK]";
  spec.prefix = "##";
  const std::pair<const char*, std::optional<std::string> TokenizerSpec::*> names[] = {
      {"[UNK]", &TokenizerSpec::unk},
      {"[PAD]", &TokenizerSpec::pad},
      {"[CLS]", &TokenizerSpec::bos},
      {"[SEP]", &TokenizerSpec::eos}};
  for (const auto& [name, member] : names) spec.*member = name;
  BertNormalizerOptions options;
  std::optional<bool> strip_accents;
  if (!config.empty()) {
    result.documents.push_back(std::make_unique<JsonFile>(std::move(config), std::move(config_name)));
    const JsonFile& settings = *result.documents.back();
    const object fields = settings.object(settings.root(), "");
    options.lowercase = settings.boolean_or(fields, "", "do_lower_case", true);
    options.chinese = settings.boolean_or(fields, "", "tokenize_chinese_chars", true);
    if (const auto value = settings.member(fields, "strip_accents"))
      strip_accents = settings.boolean(*value, "strip_accents");
    read_special_names(settings, spec);
    if (spec.unk) spec.unknown = spec.unk;
  }
  options.strip_accents = strip_accents.value_or(options.lowercase);
  spec.normalizers.push_back(bert_normalizer_step(options));
  spec.splits.push_back(bert_pre_tokenizer_step());
  spec.alphabet_splits = spec.splits;
  DecoderStep decoder;
  decoder.kind = DecoderStep::Kind::word_piece;
  decoder.content = spec.prefix;
  decoder.cleanup = true;
  spec.decoder.emplace().steps.push_back(decoder);
  const auto id_of = [&](std::string_view name) {
    for (const auto& [token, id] : spec.vocab)
      if (token == name) return id;
    return -1;
  };
  for (const std::string_view name : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})
    if (const int32_t id = id_of(name); id >= 0) {
      AddedToken token;
      token.id = id;
      token.content = name;
      token.special = true;
      spec.added.push_back(std::move(token));
    }
  PostStep around;
  if (const int32_t id = id_of("[CLS]"); id >= 0) around.before.push_back(id);
  if (const int32_t id = id_of("[SEP]"); id >= 0) around.after.push_back(id);
  spec.post.push_back(std::move(around));
  return result;
}

}  // namespace capstan::text

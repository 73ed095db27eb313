#include "text/tokenizer/load.hpp"

#include "base/text.hpp"
#include "text/tokenizer/load_stages.hpp"
#include "text/tokenizer/split_steps.hpp"

namespace capstan::text {

namespace {

void read_flags(const JsonNode& node, AddedToken& token) {
  token.single_word = node.boolean("single_word", false);
  token.lstrip = node.boolean("lstrip", false);
  token.rstrip = node.boolean("rstrip", false);
  token.special = node.boolean("special", false);
  token.normalized = node.boolean("normalized", !token.special);
}

void add_special(TokenizerSpec& spec, std::string_view content) {
  for (const auto& [token, id] : spec.vocab)
    if (token == content) {
      AddedToken added;
      added.id = id;
      added.content = content;
      added.special = true;
      spec.added.push_back(std::move(added));
    }
}

// Splits "left right" at its only space; nullopt for another number of spaces.
std::optional<std::pair<std::string_view, std::string_view>> two_tokens(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
    return std::nullopt;
  return std::pair{line.substr(0, space), line.substr(space + 1)};
}

std::string not_two_tokens(std::string_view line) {
  return "expected two tokens with one space between them, got " + in_quotes(line);
}

// Reads an object that maps tokens to ids.
void read_vocab(const JsonNode& vocab, TokenizerSpec& spec) {
  for (const auto field : vocab.map()) {
    const auto is_id =
        field.value.is_int64() && int64_t{field.value} >= 0 && int64_t{field.value} < INT32_MAX;
    spec.vocab.emplace_back(field.key, is_id ? static_cast<int32_t>(int64_t{field.value})
                                             : vocab.entry(field.key, field.value).token_id());
  }
}

class TokenizerJson {
 public:
  explicit TokenizerJson(TokenizerSpec& spec) : spec_(spec) {}

  void read(const JsonNode& root) {
    root.object();
    if (const auto version = root.find("version"); version && version->text() != "1.0")
      version->fail("expected \"1.0\", got " + in_quotes(version->text()), ErrorCode::unsupported);
    const auto model = root.find("model");
    if (!model) root.fail("there is no `model`: this is not a tokenizer.json");
    // "truncation" and "padding" are ignored: they apply to batches of model inputs, and encode() never
    // truncates or pads.
    read_added(root);
    read_stages(root, spec_);
    read_model(*model);
  }

 private:
  void read_added(const JsonNode& root) {
    spec_.added_location = root.location() + ": added_tokens";
    const auto list = root.find("added_tokens");
    if (!list) return;
    for (const JsonNode& node : list->items()) {
      node.object();
      if (!node.find("id") || !node.find("content")) node.fail("`id` and `content` are needed");
      AddedToken token;
      token.id = node.at("id").token_id();
      token.content = node.at("content").text();
      read_flags(node, token);
      spec_.added.push_back(std::move(token));
    }
  }

  void read_model(const JsonNode& model) {
    model.map();
    const auto vocab = model.find("vocab");
    // Older files do not give the type.
    const std::string_view otherwise = vocab && vocab->value().is_array()       ? "Unigram"
                                       : model.find("max_input_chars_per_word") ? "WordPiece"
                                                                                : "BPE";
    const std::string_view type = model.text("type", otherwise);
    if (type != "BPE" && type != "Unigram" && type != "WordPiece")
      model.at("type").fail_unknown("model", type, "BPE, Unigram, WordPiece");
    model.object();
    if (!vocab) model.fail("there is no `vocab`");
    spec_.vocab_location = vocab->location();
    spec_.byte_fallback = model.boolean("byte_fallback", false);
    if (type == "Unigram") return read_unigram(model, *vocab);
    read_vocab(*vocab, spec_);
    if (const auto token = model.find("unk_token")) spec_.unknown = token->text();
    if (type == "WordPiece") return read_word_piece(model);
    read_bpe(model);
  }

  void read_word_piece(const JsonNode& model) {
    spec_.model = TokenizerSpec::ModelKind::word_piece;
    spec_.prefix = model.text("continuing_subword_prefix", "##");
    if (!spec_.unknown) spec_.unknown = "[UNK]";
    if (const auto most = model.find("max_input_chars_per_word")) {
      spec_.max_characters_per_word = most->integer();
      if (spec_.max_characters_per_word < 0) most->fail("the number is out of range");
    }
  }

  void read_bpe(const JsonNode& model) {
    if (const auto dropout = model.find("dropout")) {
      double rate = 0;
      if (dropout->value().get(rate) || rate != 0)
        dropout->fail("merges that are dropped at random are not supported", ErrorCode::unsupported);
    }
    spec_.prefix = model.text("continuing_subword_prefix", "");
    spec_.suffix = model.text("end_of_word_suffix", "");
    spec_.fuse_unknown = model.boolean("fuse_unk", false);
    spec_.ignore_merges = model.boolean("ignore_merges", false);
    const JsonNode merges = model.at("merges");
    spec_.merges_location = merges.location();
    size_t index = 0;
    for (const auto merge : merges.array()) read_merge(merges, merge, index++);
  }

  // Reads the vocabulary of Unigram, [["piece", score], …], in which the index is the id.
  void read_unigram(const JsonNode& model, const JsonNode& vocab) {
    spec_.model = TokenizerSpec::ModelKind::unigram;
    for (const auto entry : vocab.array()) {
      const size_t id = spec_.vocab.size();
      simdjson::dom::array pair;
      double score = 0;
      if (entry.get(pair) || pair.size() != 2 || !pair.at(0).is_string() || pair.at(1).get(score))
        vocab.item(id, entry).fail("expected a token and its score");
      spec_.vocab.emplace_back(std::string_view(pair.at(0)), static_cast<int32_t>(id));
      spec_.scores.push_back(score);
    }
    const auto unknown = model.find("unk_id");
    if (!unknown) return;
    const auto id = static_cast<size_t>(unknown->token_id());
    if (id >= spec_.vocab.size())
      unknown->fail("the id " + std::to_string(id) + " is not in the vocabulary of " +
                    std::to_string(spec_.vocab.size()) + " tokens");
    spec_.unknown = spec_.vocab[id].first;
  }

  void read_merge(const JsonNode& merges, simdjson::dom::element merge, size_t index) {
    std::string_view line;
    // Older files write a merge as "left right".
    if (merge.get(line) == simdjson::SUCCESS) {
      if (line.starts_with("#version")) return;
      const auto pair = two_tokens(line);
      if (!pair) merges.item(index, merge).fail(not_two_tokens(line));
      spec_.merges.push_back(*pair);
      return;
    }
    simdjson::dom::array pair;
    if (merge.get(pair) || pair.size() != 2 || !pair.at(0).is_string() || !pair.at(1).is_string())
      merges.item(index, merge).fail("expected a pair of strings");
    spec_.merges.emplace_back(std::string_view(pair.at(0)), std::string_view(pair.at(1)));
  }

  TokenizerSpec& spec_;
};

}  // namespace

const JsonFile& LoadedSpec::add_document(std::string text, std::string name) {
  return *documents.emplace_back(std::make_unique<JsonFile>(std::move(text), std::move(name)));
}

LoadedSpec read_tokenizer_json(std::string text, std::string name) {
  LoadedSpec result;
  TokenizerJson(result.spec).read(result.add_document(std::move(text), std::move(name)).root());
  return result;
}

void read_special_names(const JsonNode& config, TokenizerSpec& spec) {
  config.object();
  // A string, or an object with "content".
  const auto take = [&](const char* key, std::optional<std::string>& name) {
    const auto value = config.find(key);
    if (!value) return;
    if (value->value().is_object()) value->object();
    const auto given = value->value().is_object() ? value->text("content", "") : value->text();
    if (!given.empty()) name.emplace(given);
  };
  take("bos_token", spec.bos);
  take("eos_token", spec.eos);
  take("unk_token", spec.unk);
  take("pad_token", spec.pad);
  if (const auto add = config.find("add_bos_token")) spec.add_bos = add->boolean();
  if (const auto add = config.find("add_eos_token")) spec.add_eos = add->boolean();
}

void read_added_tokens_decoder(const JsonNode& settings, TokenizerSpec& spec) {
  settings.object();
  const auto added = settings.find("added_tokens_decoder");
  if (!added) return;
  spec.added_location = added->location();
  for (const auto field : added->object()) {
    const JsonNode node = added->member(field.key, field.value);
    node.object();
    const auto id = parse_int(field.key);
    if (!id || *id < 0 || *id > INT32_MAX - 1) node.fail("the id is not a number in range");
    AddedToken token;
    token.id = static_cast<int32_t>(*id);
    token.content = node.text("content", "");
    read_flags(node, token);
    spec.added.push_back(std::move(token));
  }
}

LoadedSpec read_vocab_and_merges(std::string vocab, std::string vocab_name, std::string merges,
                                 std::string merges_name, std::string config, std::string config_name) {
  using Kind = PreTokenizerStep::Kind;
  LoadedSpec result;
  TokenizerSpec& spec = result.spec;
  const JsonFile& file = result.add_document(std::move(vocab), std::move(vocab_name));
  spec.vocab_location = spec.added_location = file.name();
  read_vocab(file.root(), spec);

  result.lines = std::make_unique<const std::string>(std::move(merges));
  spec.merges_location = merges_name;
  spec.merges_are_lines = true;
  size_t number = 0;
  for (std::string_view line : split(*result.lines, '\n')) {
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) {
      // Empty lines count in the line numbers of messages but not in the ranks, as in Hugging Face's reader.
      spec.merges.emplace_back(std::string_view(), std::string_view());
      continue;
    }
    const auto pair = two_tokens(line);
    if (!pair)
      fail(ErrorCode::format, merges_name + ":" + std::to_string(number) + ": " + not_two_tokens(line));
    spec.merges.push_back(*pair);
  }

  PreTokenizerStep step;
  step.kind = Kind::gpt2;
  if (config.empty()) {
    add_special(spec, "<|endoftext|>");
  } else {
    const JsonNode settings = result.add_document(std::move(config), std::move(config_name)).root();
    read_special_names(settings, spec);
    std::string_view kind = settings.text("tokenizer_class", "GPT2Tokenizer");
    if (kind.size() > 4 && kind.ends_with("Fast")) kind.remove_suffix(4);
    if (kind == "Qwen2Tokenizer") {
      step.kind = Kind::qwen2;
      spec.normalizer.nfc = true;
    } else if (kind == "GPT2Tokenizer") {
      step.add_prefix_space = settings.boolean("add_prefix_space", false);
    } else {
      fail(ErrorCode::unsupported,
           settings.location() + ": tokenizer_class: " + in_quotes(kind) +
               " with vocab.json and merges.txt is not supported",
           "supported here: GPT2Tokenizer, Qwen2Tokenizer; any other byte-level one as tokenizer.json");
    }
    read_added_tokens_decoder(settings, spec);
    if (!settings.find("added_tokens_decoder")) add_special(spec, "<|endoftext|>");
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
  spec.vocab_location = spec.added_location = vocab_name;
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
  spec.unk = "[UNK]", spec.pad = "[PAD]", spec.bos = "[CLS]", spec.eos = "[SEP]";
  BertNormalizerOptions options;
  std::optional<bool> strip_accents;
  if (!config.empty()) {
    const JsonNode settings = result.add_document(std::move(config), std::move(config_name)).root();
    read_special_names(settings, spec);
    options.lowercase = settings.boolean("do_lower_case", true);
    options.chinese = settings.boolean("tokenize_chinese_chars", true);
    if (const auto value = settings.find("strip_accents")) strip_accents = value->boolean();
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
  for (const char* name : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) add_special(spec, name);
  PostStep around;
  if (const int32_t id = id_of("[CLS]"); id >= 0) around.before.push_back(id);
  if (const int32_t id = id_of("[SEP]"); id >= 0) around.after.push_back(id);
  spec.post.push_back(std::move(around));
  return result;
}

}  // namespace capstan::text

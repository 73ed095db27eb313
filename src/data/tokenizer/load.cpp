#include "data/tokenizer/load.hpp"

#include "base/text.hpp"

namespace capstan::data {

namespace {

using simdjson::dom::element;
using simdjson::dom::object;

std::string child(std::string_view path, std::string_view key) {
  return std::string(path) + "." + std::string(key);
}
std::string child(std::string_view path, size_t index) {
  return std::string(path) + "[" + std::to_string(index) + "]";
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
    if (const auto value = file_.member(root, "normalizer")) read_normalizer(*value, "normalizer");
    if (const auto value = file_.member(root, "pre_tokenizer")) read_pre_tokenizer(*value, "pre_tokenizer");
    if (!byte_level_)
      file_.fail_at("pre_tokenizer", "there is no ByteLevel step: only byte-level tokenizers are supported",
                    ErrorCode::unsupported);
    if (const auto value = file_.member(root, "decoder")) read_decoder(*value, "decoder");
    if (const auto value = file_.member(root, "post_processor"))
      read_post_processor(*value, "post_processor");
    read_model(*model);
  }

 private:
  [[noreturn]] void unknown(std::string_view path, std::string_view kind, std::string_view type,
                            std::string_view known) const {
    fail(ErrorCode::unsupported,
         file_.name() + ": " + std::string(path) + ": the " + std::string(kind) + " " + quoted(type) +
             " is not supported",
         "supported here: " + std::string(known));
  }
  // The object and its "type".
  std::pair<object, std::string_view> typed(element value, std::string_view path) const {
    const object fields = file_.object(value, path);
    const auto type = file_.member(fields, "type");
    if (!type) file_.fail_at(path, "there is no `type`");
    return {fields, file_.text(*type, child(path, "type"))};
  }

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
      token.id = token_id(*id, child(path, "id"));
      token.content = file_.text(*content, child(path, "content"));
      token.single_word = file_.boolean_or(fields, path, "single_word", false);
      token.lstrip = file_.boolean_or(fields, path, "lstrip", false);
      token.rstrip = file_.boolean_or(fields, path, "rstrip", false);
      token.special = file_.boolean_or(fields, path, "special", false);
      token.normalized = file_.boolean_or(fields, path, "normalized", !token.special);
      spec_.added.push_back(std::move(token));
    }
  }

  int32_t token_id(element value, std::string_view path) const {
    const int64_t id = file_.integer(value, path);
    if (id < 0 || id > INT32_MAX - 1)
      file_.fail_at(path, "the id " + std::to_string(id) + " is out of range");
    return static_cast<int32_t>(id);
  }

  void read_normalizer(element value, const std::string& path) {
    const auto [fields, type] = typed(value, path);
    if (type == "NFC") {
      spec_.normalizer.nfc = true;
    } else if (type == "Sequence") {
      const auto parts = file_.member(fields, "normalizers");
      if (!parts) file_.fail_at(path, "there is no `normalizers`");
      size_t index = 0;
      for (const element part : file_.array(*parts, child(path, "normalizers")))
        read_normalizer(part, child(child(path, "normalizers"), index++));
    } else {
      unknown(path, "normalizer", type, "NFC, Sequence");
    }
  }

  void add_step(PreTokenizerStep step, const std::string& path) {
    if (byte_level_)
      file_.fail_at(path, "a step after ByteLevel would see bytes instead of text", ErrorCode::unsupported);
    if (spec_.pre_tokenizer.steps.size() == PreTokenizer::kMaxSteps)
      file_.fail_at(path, "there are more than " + std::to_string(PreTokenizer::kMaxSteps) + " steps",
                    ErrorCode::unsupported);
    spec_.pre_tokenizer.steps.push_back(std::move(step));
  }

  void read_pre_tokenizer(element value, const std::string& path) {
    using Kind = PreTokenizerStep::Kind;
    const auto [fields, type] = typed(value, path);
    PreTokenizerStep step;
    if (type == "ByteLevel") {
      step.add_prefix_space = file_.boolean_or(fields, path, "add_prefix_space", true);
      step.kind = file_.boolean_or(fields, path, "use_regex", true) ? Kind::gpt2 : Kind::whole;
      // A step that changes nothing is none.
      if (step.add_prefix_space || step.kind != Kind::whole || spec_.pre_tokenizer.steps.empty())
        add_step(step, path);
      byte_level_ = true;
    } else if (type == "Split") {
      read_split(fields, path);
    } else if (type == "Digits") {
      step.kind =
          file_.boolean_or(fields, path, "individual_digits", false) ? Kind::single_digits : Kind::digit_runs;
      add_step(step, path);
    } else if (type == "Sequence") {
      const auto parts = file_.member(fields, "pretokenizers");
      if (!parts) file_.fail_at(path, "there is no `pretokenizers`");
      size_t index = 0;
      for (const element part : file_.array(*parts, child(path, "pretokenizers")))
        read_pre_tokenizer(part, child(child(path, "pretokenizers"), index++));
    } else {
      unknown(path, "pre-tokenizer", type, "ByteLevel, Split, Digits, Sequence");
    }
  }

  void read_split(object fields, const std::string& path) {
    using Kind = PreTokenizerStep::Kind;
    PreTokenizerStep step;
    step.kind = Kind::pattern;
    const std::string_view behavior = file_.text_or(fields, path, "behavior", "");
    step.invert = file_.boolean_or(fields, path, "invert", false);
    if (behavior == "Removed")
      step.behavior = SplitBehavior::removed;
    else if (behavior == "Isolated")
      step.behavior = SplitBehavior::isolated;
    else if (behavior == "MergedWithPrevious")
      step.behavior = SplitBehavior::merged_with_previous;
    else if (behavior == "MergedWithNext")
      step.behavior = SplitBehavior::merged_with_next;
    else if (behavior == "Contiguous")
      step.behavior = SplitBehavior::contiguous;
    else
      file_.fail_at(child(path, "behavior"), "unknown behavior " + quoted(behavior));

    const auto pattern = file_.member(fields, "pattern");
    if (!pattern) file_.fail_at(path, "there is no `pattern`");
    const std::string pattern_path = child(path, "pattern");
    const object choice = file_.object(*pattern, pattern_path);
    const auto regex = file_.member(choice, "Regex"), literal = file_.member(choice, "String");
    if (!regex == !literal) file_.fail_at(pattern_path, "expected one of `Regex` and `String`");
    const std::string text(file_.text(regex ? *regex : *literal, pattern_path));
    // The known patterns match every character, so that what they leave out is nothing.
    const bool everything = (step.behavior == SplitBehavior::isolated) ||
                            (step.behavior == SplitBehavior::removed && step.invert);
    if (!regex || !everything || !known_pattern(text, step.kind)) {
      step.kind = Kind::pattern;
      try {
        step.pattern = regex ? Pattern::compile(text) : Pattern::literal(text);
      } catch (const Error& error) {
        file_.fail_at(pattern_path, error.message(), error.code());
      }
    }
    add_step(std::move(step), path);
  }

  void read_decoder(element value, const std::string& path) {
    const auto [fields, type] = typed(value, path);
    if (type == "ByteLevel") return;
    if (type != "Sequence") unknown(path, "decoder", type, "ByteLevel, Sequence");
    const auto parts = file_.member(fields, "decoders");
    if (!parts) file_.fail_at(path, "there is no `decoders`");
    size_t index = 0;
    for (const element part : file_.array(*parts, child(path, "decoders")))
      read_decoder(part, child(child(path, "decoders"), index++));
  }

  // Post-processors add special tokens or trim offsets; neither concerns encode(). The name of the first
  // token is kept.
  void read_post_processor(element value, const std::string& path) {
    const auto [fields, type] = typed(value, path);
    if (type == "TemplateProcessing") {
      const auto single = file_.member(fields, "single");
      if (!single) return;
      const std::string single_path = child(path, "single");
      size_t index = 0;
      for (const element part : file_.array(*single, single_path)) {
        const std::string part_path = child(single_path, index++);
        const object piece = file_.object(part, part_path);
        const auto special = file_.member(piece, "SpecialToken");
        if (!special) break;
        if (!spec_.bos) spec_.bos = file_.text_or(file_.object(*special, part_path), part_path, "id", "");
      }
    } else if (type == "Sequence") {
      const auto parts = file_.member(fields, "processors");
      if (!parts) file_.fail_at(path, "there is no `processors`");
      size_t index = 0;
      for (const element part : file_.array(*parts, child(path, "processors")))
        read_post_processor(part, child(child(path, "processors"), index++));
    } else if (type != "ByteLevel" && type != "RobertaProcessing" && type != "BertProcessing") {
      unknown(path, "post-processor", type,
              "ByteLevel, TemplateProcessing, RobertaProcessing, BertProcessing, Sequence");
    }
  }

  void read_model(element value) {
    const std::string path = "model";
    object fields;
    if (value.get(fields))
      file_.fail_at(path, "expected an object, got " + std::string(json_type_name(value)));
    const std::string_view type = file_.text_or(fields, path, "type", "BPE");
    if (type != "BPE") unknown(child(path, "type"), "model", type, "BPE");
    file_.object(value, path);
    if (const auto dropout = file_.member(fields, "dropout")) {
      double rate = 0;
      if (dropout->get(rate) || rate != 0)
        file_.fail_at("model.dropout", "merges that are dropped at random are not supported",
                      ErrorCode::unsupported);
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!file_.text_or(fields, path, key, "").empty())
        file_.fail_at(child(path, key), "not supported in a byte-level tokenizer", ErrorCode::unsupported);
    spec_.fuse_unknown = file_.boolean_or(fields, path, "fuse_unk", false);
    spec_.byte_fallback = file_.boolean_or(fields, path, "byte_fallback", false);
    spec_.ignore_merges = file_.boolean_or(fields, path, "ignore_merges", false);
    if (const auto token = file_.member(fields, "unk_token"))
      spec_.unknown = file_.text(*token, "model.unk_token");

    const auto vocab = file_.member(fields, "vocab");
    if (!vocab) file_.fail_at(path, "there is no `vocab`");
    spec_.vocab_place = file_.name() + ": model.vocab";
    object entries;
    if (vocab->get(entries))
      file_.fail_at("model.vocab", "expected an object, got " + std::string(json_type_name(*vocab)));
    for (const auto field : entries) {
      if (!field.value.is_int64() || int64_t{field.value} < 0 || int64_t{field.value} > INT32_MAX - 1)
        token_id(field.value, "model.vocab[" + quoted(field.key) + "]");
      spec_.vocab.emplace_back(field.key, static_cast<int32_t>(int64_t{field.value}));
    }
    spec_.merges_place = file_.name() + ": model.merges";
    const auto merges = file_.member(fields, "merges");
    if (!merges) file_.fail_at(path, "there is no `merges`");
    size_t index = 0;
    for (const element merge : file_.array(*merges, "model.merges")) read_merge(merge, index++);
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
  bool byte_level_ = false;
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
  if (auto name = special_name(config, fields, "bos_token"); name && !name->empty()) spec.bos = name;
  if (auto name = special_name(config, fields, "eos_token"); name && !name->empty()) spec.eos = name;
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

  result.merges_text = std::make_unique<const std::string>(std::move(merges));
  spec.merges_place = merges_name;
  spec.merges_are_lines = true;
  size_t number = 0;
  for (std::string_view line : split(*result.merges_text, '\n')) {
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
    if (const auto added = settings.member(fields, "added_tokens_decoder")) {
      spec.added_place = settings.name() + ": added_tokens_decoder";
      for (const auto field : settings.object(*added, "added_tokens_decoder")) {
        const std::string path = child("added_tokens_decoder", field.key);
        const object token_fields = settings.object(field.value, path);
        const auto id = parse_int(field.key);
        if (!id || *id < 0 || *id > INT32_MAX - 1) settings.fail_at(path, "the id is not a number in range");
        AddedToken token;
        token.id = static_cast<int32_t>(*id);
        token.content = settings.text_or(token_fields, path, "content", "");
        token.single_word = settings.boolean_or(token_fields, path, "single_word", false);
        token.lstrip = settings.boolean_or(token_fields, path, "lstrip", false);
        token.rstrip = settings.boolean_or(token_fields, path, "rstrip", false);
        token.special = settings.boolean_or(token_fields, path, "special", false);
        token.normalized = settings.boolean_or(token_fields, path, "normalized", !token.special);
        spec.added.push_back(std::move(token));
      }
    } else {
      add_special("<|endoftext|>");
    }
  }
  spec.pre_tokenizer.steps.push_back(step);
  return result;
}

}  // namespace capstan::data

#include "text/tokenizer/load_stages.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/base64.hpp"
#include "text/tokenizer/split_steps.hpp"

namespace capstan::text {

namespace {

constexpr size_t kMaxSteps = 64;

// Reads a step that has no settings.
using MakeStep = TextStepPtr (*)();

template <class Value>
const Value* find_type(const std::vector<std::pair<std::string_view, Value>>& table, std::string_view type) {
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const auto& one) { return one.first == type; });
  return found == table.end() ? nullptr : &found->second;
}

class StageReader {
 public:
  explicit StageReader(TokenizerSpec& spec) : spec_(spec) {}

  void read(const JsonNode& root) {
    if (const auto value = root.find("normalizer")) read_normalizer(*value);
    if (const auto value = root.find("pre_tokenizer")) read_pre_tokenizer(*value);
    spec_.byte_level = byte_level_ && simple_;
    if (const auto value = root.find("decoder")) {
      spec_.decoder.emplace();
      read_decoder(*value);
    }
    if (const auto value = root.find("post_processor")) read_post_processor(*value);
  }

 private:
  template <class Steps>
  static void add(Steps& steps, typename Steps::value_type step, const JsonNode& node) {
    if (steps.size() == kMaxSteps)
      node.fail("there are more than " + std::to_string(kMaxSteps) + " steps", ErrorCode::unsupported);
    steps.push_back(std::move(step));
  }

  // {"Regex": …} or {"String": …}.
  struct PatternField {
    bool is_regex;
    std::string text;
    std::shared_ptr<const Pattern> compiled;
  };
  static PatternField read_pattern(const JsonNode& step) {
    const JsonNode node = step.at("pattern");
    node.object();
    const auto regex = node.find("Regex"), literal = node.find("String");
    if (!regex == !literal) node.fail("expected one of `Regex` and `String`");
    const std::string text((regex ? *regex : *literal).text());
    try {
      return {regex.has_value(), text, regex ? Pattern::compile(text) : Pattern::literal(text)};
    } catch (const Error& error) {
      node.fail(error.message(), error.code());
    }
  }

  // Reads a text that is inserted on every use, so its length is limited.
  static std::string read_content(const JsonNode& node) {
    std::string text(node.text());
    constexpr size_t kMaxContentBytes = 1024;
    if (text.size() > kMaxContentBytes)
      node.fail(
          "has " + std::to_string(text.size()) + " bytes; the limit is " + std::to_string(kMaxContentBytes),
          ErrorCode::unsupported);
    return text;
  }

  static std::string read_character(const JsonNode& node) {
    std::string text(node.text());
    if (count_code_points(text) != 1) node.fail("expected one character, got " + in_quotes(text));
    return text;
  }

  static size_t read_count(const JsonNode& node) {
    const int64_t count = node.integer();
    if (count < 0 || count > 1'000'000) node.fail("the number " + std::to_string(count) + " is out of range");
    return static_cast<size_t>(count);
  }

  void read_normalizer(const JsonNode& node) {
    static const std::vector<std::pair<std::string_view, MakeStep>> kPlain = {
        {"NFD", [] { return unicode_form_step(UnicodeForm::nfd); }},
        {"NFKC", [] { return unicode_form_step(UnicodeForm::nfkc); }},
        {"NFKD", [] { return unicode_form_step(UnicodeForm::nfkd); }},
        {"Lowercase", lowercase_step},
        {"StripAccents", strip_accents_step},
        {"Nmt", nmt_step},
        {"ByteLevel", byte_alphabet_step}};
    const std::string_view type = node.type();
    if (type == "NFC") {
      spec_.normalizer.nfc = true;
      return add(spec_.normalizers, unicode_form_step(UnicodeForm::nfc), node);
    }
    if (type == "Sequence") {
      for (const JsonNode& part : node.at("normalizers").items()) read_normalizer(part);
      return;
    }
    simple_ = false;
    TextStepPtr step;
    if (const MakeStep* make = find_type(kPlain, type)) {
      step = (*make)();
    } else if (type == "Strip") {
      step = strip_step(node.boolean("strip_left", true), node.boolean("strip_right", true));
    } else if (type == "Prepend") {
      step = prepend_step(read_content(node.at("prepend")));
    } else if (type == "Replace") {
      auto pattern = read_pattern(node).compiled;
      step = replace_step(std::move(pattern), read_content(node.at("content")));
    } else if (type == "Precompiled") {
      const JsonNode charsmap = node.at("precompiled_charsmap");
      const auto blob = decode_base64(charsmap.text());
      if (!blob) charsmap.fail("expected base64");
      step = charsmap_step(std::make_shared<const Charsmap>(*blob, charsmap.location()));
    } else if (type == "BertNormalizer") {
      BertNormalizerOptions options;
      options.clean_text = node.boolean("clean_text", true);
      options.chinese = node.boolean("handle_chinese_chars", true);
      options.lowercase = node.boolean("lowercase", true);
      options.strip_accents = node.boolean("strip_accents", options.lowercase);
      step = bert_normalizer_step(options);
    } else {
      node.fail_unknown("normalizer", type,
                        "NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, "
                        "Precompiled, BertNormalizer, Nmt, ByteLevel, Sequence");
    }
    add(spec_.normalizers, std::move(step), node);
  }

  // A step that the fast path supports.
  void add_scanner(PreTokenizerStep step, const JsonNode& node) {
    if (spec_.pre_tokenizer.steps.size() == PreTokenizer::kMaxSteps) simple_ = false;
    if (simple_) spec_.pre_tokenizer.steps.push_back(step);
    add_split(scanner_step(step), node);
  }
  void add_split(TextStepPtr step, const JsonNode& node) {
    // This step receives the byte-level alphabet instead of bytes.
    if (byte_level_) simple_ = false;
    add(spec_.splits, step, node);
    spec_.alphabet_splits.push_back(std::move(step));
  }
  void add_other_split(TextStepPtr step, const JsonNode& node) {
    simple_ = false;
    add_split(std::move(step), node);
  }

  void read_pre_tokenizer(const JsonNode& node) {
    using Kind = PreTokenizerStep::Kind;
    static const std::vector<std::pair<std::string_view, MakeStep>> kPlain = {
        {"Whitespace", whitespace_step},
        {"WhitespaceSplit", whitespace_split_step},
        {"BertPreTokenizer", bert_pre_tokenizer_step}};
    const std::string_view type = node.type();
    PreTokenizerStep step;
    if (const MakeStep* make = find_type(kPlain, type)) {
      add_other_split((*make)(), node);
    } else if (type == "ByteLevel") {
      step.add_prefix_space = node.boolean("add_prefix_space", true);
      step.kind = node.boolean("use_regex", true) ? Kind::gpt2 : Kind::unsplit;
      // A step without effect is dropped.
      if (step.add_prefix_space || step.kind != Kind::unsplit || spec_.pre_tokenizer.steps.empty())
        add_scanner(step, node);
      if (byte_level_) simple_ = false;
      byte_level_ = true;
      spec_.alphabet_splits.push_back(byte_alphabet_step());
    } else if (type == "Split") {
      read_split(node);
    } else if (type == "Digits") {
      step.kind = node.boolean("individual_digits", false) ? Kind::single_digits : Kind::digit_groups;
      add_scanner(step, node);
    } else if (type == "Metaspace") {
      const auto [replacement, scheme] = read_metaspace(node);
      spec_.needs_origin = spec_.needs_origin || scheme == PrependScheme::first;
      add_other_split(metaspace_step(replacement, scheme, node.boolean("split", true)), node);
    } else if (type == "Punctuation") {
      add_other_split(punctuation_step(read_behavior(node, "Isolated")), node);
    } else if (type == "CharDelimiterSplit") {
      add_other_split(delimiter_step(decode_utf8(read_character(node.at("delimiter")), 0).value), node);
    } else if (type == "Sequence") {
      for (const JsonNode& part : node.at("pretokenizers").items()) read_pre_tokenizer(part);
    } else {
      node.fail_unknown("pre-tokenizer", type,
                        "ByteLevel, Split, Digits, Metaspace, Whitespace, WhitespaceSplit, Punctuation, "
                        "BertPreTokenizer, CharDelimiterSplit, Sequence");
    }
  }

  std::pair<std::string, PrependScheme> read_metaspace(const JsonNode& node) const {
    const std::string_view name = node.text("prepend_scheme", "always");
    PrependScheme scheme = PrependScheme::always;
    if (name == "first")
      scheme = PrependScheme::first;
    else if (name == "never")
      scheme = PrependScheme::never;
    else if (name != "always")
      node.at("prepend_scheme").fail("expected always, first or never, got " + in_quotes(name));
    if (!node.boolean("add_prefix_space", true)) {
      if (node.find("prepend_scheme") && scheme != PrependScheme::never)
        node.fail("add_prefix_space is false, but prepend_scheme is " + in_quotes(name));
      scheme = PrependScheme::never;
    }
    return {read_character(node.at("replacement")), scheme};
  }

  SplitBehavior read_behavior(const JsonNode& node, std::string_view otherwise) const {
    const std::string_view behavior = node.text("behavior", otherwise);
    if (behavior == "Removed") return SplitBehavior::removed;
    if (behavior == "Isolated") return SplitBehavior::isolated;
    if (behavior == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
    if (behavior == "MergedWithNext") return SplitBehavior::merged_with_next;
    if (behavior == "Contiguous") return SplitBehavior::contiguous;
    node.at("behavior").fail("unknown behavior " + in_quotes(behavior));
  }

  void read_split(const JsonNode& node) {
    PreTokenizerStep step;
    step.behavior = read_behavior(node, "");
    step.invert = node.boolean("invert", false);
    const PatternField pattern = read_pattern(node);
    // The known patterns match every character, so no text lies between their matches.
    const bool everything = (step.behavior == SplitBehavior::isolated) ||
                            (step.behavior == SplitBehavior::removed && step.invert);
    if (!pattern.is_regex || !everything || !known_pattern(pattern.text, step.kind)) {
      step.kind = PreTokenizerStep::Kind::pattern;
      step.pattern = pattern.compiled;
    }
    add_scanner(std::move(step), node);
  }

  void read_decoder(const JsonNode& node) {
    using Kind = DecoderStep::Kind;
    static const std::vector<std::pair<std::string_view, Kind>> kKinds = {
        {"ByteLevel", Kind::byte_level},       {"Metaspace", Kind::metaspace}, {"Replace", Kind::replace},
        {"ByteFallback", Kind::byte_fallback}, {"Fuse", Kind::fuse},           {"Strip", Kind::strip},
        {"WordPiece", Kind::word_piece},       {"BPEDecoder", Kind::bpe}};
    const std::string_view type = node.type();
    if (type == "Sequence") {
      for (const JsonNode& part : node.at("decoders").items()) read_decoder(part);
      return;
    }
    const Kind* kind = find_type(kKinds, type);
    if (!kind)
      node.fail_unknown("decoder", type,
                        "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip, WordPiece, BPEDecoder, "
                        "Sequence");
    DecoderStep step;
    step.kind = *kind;
    if (*kind == Kind::metaspace) {
      const auto [replacement, scheme] = read_metaspace(node);
      step.content = replacement;
      step.prepended = scheme != PrependScheme::never;
    } else if (*kind == Kind::replace) {
      step.pattern = read_pattern(node).compiled;
      step.content = read_content(node.at("content"));
    } else if (*kind == Kind::strip) {
      step.content = read_character(node.at("content"));
      step.start = read_count(node.at("start"));
      step.stop = read_count(node.at("stop"));
    } else if (*kind == Kind::word_piece) {
      step.content = node.text("prefix", "##");
      step.cleanup = node.boolean("cleanup", true);
    } else if (*kind == Kind::bpe) {
      step.content = node.text("suffix", "</w>");
    }
    add(spec_.decoder->steps, std::move(step), node);
  }

  void read_post_processor(const JsonNode& node) {
    const std::string_view type = node.type();
    PostStep step;
    if (type == "TemplateProcessing") {
      read_template(node, step);
    } else if (type == "RobertaProcessing" || type == "BertProcessing") {
      step.before.push_back(read_pair(node.at("cls")));
      step.after.push_back(read_pair(node.at("sep")));
    } else if (type == "Sequence") {
      for (const JsonNode& part : node.at("processors").items()) read_post_processor(part);
      return;
    } else if (type != "ByteLevel") {
      node.fail_unknown("post-processor", type,
                        "ByteLevel, TemplateProcessing, RobertaProcessing, BertProcessing, Sequence");
    }
    if (type == "ByteLevel" || type == "RobertaProcessing") {
      step.trim = node.boolean("trim_offsets", true);
      step.add_prefix_space = node.boolean("add_prefix_space", true);
    }
    add(spec_.post, std::move(step), node);
  }

  // ["[CLS]", 101]
  static int32_t read_pair(const JsonNode& node) {
    const auto pair = node.items();
    if (pair.size() != 2) node.fail("expected a token and its id");
    pair[0].text();
    return pair[1].token_id();
  }

  void read_template(const JsonNode& node, PostStep& step) {
    const auto single = node.find("single"), specials = node.find("special_tokens");
    if (!single) return;
    if (specials) specials->object();
    bool seen = false;
    for (const JsonNode& part : single->items()) {
      part.object();
      if (const auto sequence = part.find("Sequence")) {
        sequence->object();
        if (sequence->text("id", "A") != "A" || seen)
          part.fail("expected the sequence A once", ErrorCode::unsupported);
        seen = true;
        continue;
      }
      const auto special = part.find("SpecialToken");
      if (!special) part.fail("expected `Sequence` or `SpecialToken`");
      special->object();
      const std::string name(special->at("id").text());
      if (!seen && !spec_.bos) spec_.bos = name;
      const auto token = specials ? specials->find(name) : std::nullopt;
      if (!token) part.fail("the token " + in_quotes(name) + " is not in `special_tokens`");
      token->object();
      for (const JsonNode& id : token->at("ids").items())
        (seen ? step.after : step.before).push_back(id.token_id());
    }
    if (!seen) single->fail("the sequence A is missing", ErrorCode::unsupported);
  }

  TokenizerSpec& spec_;
  bool byte_level_ = false;
  // Accepts only steps that the fast path supports.
  bool simple_ = true;
};

}  // namespace

void read_stages(const JsonNode& root, TokenizerSpec& spec) {
  StageReader(spec).read(root);
}

}  // namespace capstan::text

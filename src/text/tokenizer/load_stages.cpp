#include "text/tokenizer/load_stages.hpp"

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/base64.hpp"
#include "text/tokenizer/split_steps.hpp"

namespace capstan::text {

namespace {

using simdjson::dom::element;
using simdjson::dom::object;

constexpr size_t kMaxSteps = 64;

class StageReader {
 public:
  StageReader(const JsonFile& file, TokenizerSpec& spec) : file_(file), spec_(spec) {}

  void read() {
    const object root = file_.object(file_.root(), "");
    if (const auto value = file_.member(root, "normalizer")) read_normalizer(*value, "normalizer");
    if (const auto value = file_.member(root, "pre_tokenizer")) read_pre_tokenizer(*value, "pre_tokenizer");
    spec_.byte_level = byte_level_ && simple_;
    if (const auto value = file_.member(root, "decoder")) {
      spec_.decoder.emplace();
      read_decoder(*value, "decoder");
    }
    if (const auto value = file_.member(root, "post_processor"))
      read_post_processor(*value, "post_processor");
  }

 private:
  template <class F>
  void read_list(object fields, const std::string& path, const char* key, F read_one) {
    const std::string list_path = child(path, key);
    size_t index = 0;
    for (const element part : file_.array(file_.needed(fields, path, key), list_path))
      read_one(part, child(list_path, index++));
  }

  void add(TextSteps& steps, TextStepPtr step, const std::string& path) const {
    if (steps.size() == kMaxSteps)
      file_.fail_at(path, "there are more than " + std::to_string(kMaxSteps) + " steps",
                    ErrorCode::unsupported);
    steps.push_back(std::move(step));
  }

  // {"Regex": …} or {"String": …}.
  std::shared_ptr<const Pattern> read_pattern(object fields, const std::string& path, bool& is_regex,
                                              std::string& text) const {
    const std::string pattern_path = child(path, "pattern");
    const object choice = file_.object(file_.needed(fields, path, "pattern"), pattern_path);
    const auto regex = file_.member(choice, "Regex"), literal = file_.member(choice, "String");
    if (!regex == !literal) file_.fail_at(pattern_path, "expected one of `Regex` and `String`");
    is_regex = regex.has_value();
    text = file_.text(regex ? *regex : *literal, pattern_path);
    try {
      return regex ? Pattern::compile(text) : Pattern::literal(text);
    } catch (const Error& error) {
      file_.fail_at(pattern_path, error.message(), error.code());
    }
  }

  // What is put into text, each time: short.
  std::string read_content(object fields, const std::string& path, const char* key) const {
    const std::string text(file_.text(file_.needed(fields, path, key), child(path, key)));
    constexpr size_t kMost = 1024;
    if (text.size() > kMost)
      file_.fail_at(child(path, key),
                    "has " + std::to_string(text.size()) + " bytes; the limit is " + std::to_string(kMost),
                    ErrorCode::unsupported);
    return text;
  }

  std::string read_character(object fields, const std::string& path, const char* key) const {
    const std::string text(file_.text(file_.needed(fields, path, key), child(path, key)));
    if (count_code_points(text) != 1)
      file_.fail_at(child(path, key), "expected one character, got " + capstan::quoted(text));
    return text;
  }

  size_t read_count(object fields, const std::string& path, const char* key) const {
    const int64_t count = file_.integer(file_.needed(fields, path, key), child(path, key));
    if (count < 0 || count > 1'000'000)
      file_.fail_at(child(path, key), "the number " + std::to_string(count) + " is out of range");
    return static_cast<size_t>(count);
  }

  void read_normalizer(element value, const std::string& path) {
    const auto [fields, type] = file_.typed(value, path);
    const auto add_normalizer = [&](TextStepPtr step) {
      simple_ = false;
      add(spec_.normalizers, std::move(step), path);
    };
    if (type == "NFC") {
      spec_.normalizer.nfc = true;
      add(spec_.normalizers, unicode_form_step(UnicodeForm::nfc), path);
    } else if (type == "NFD") {
      add_normalizer(unicode_form_step(UnicodeForm::nfd));
    } else if (type == "NFKC") {
      add_normalizer(unicode_form_step(UnicodeForm::nfkc));
    } else if (type == "NFKD") {
      add_normalizer(unicode_form_step(UnicodeForm::nfkd));
    } else if (type == "Lowercase") {
      add_normalizer(lowercase_step());
    } else if (type == "Strip") {
      add_normalizer(strip_step(file_.boolean_or(fields, path, "strip_left", true),
                                file_.boolean_or(fields, path, "strip_right", true)));
    } else if (type == "StripAccents") {
      add_normalizer(strip_accents_step());
    } else if (type == "Prepend") {
      add_normalizer(prepend_step(read_content(fields, path, "prepend")));
    } else if (type == "Replace") {
      bool is_regex = false;
      std::string text;
      auto pattern = read_pattern(fields, path, is_regex, text);
      add_normalizer(replace_step(std::move(pattern), read_content(fields, path, "content")));
    } else if (type == "Precompiled") {
      const std::string place = file_.name() + ": " + child(path, "precompiled_charsmap");
      const auto blob = decode_base64(file_.text(file_.needed(fields, path, "precompiled_charsmap"),
                                                 child(path, "precompiled_charsmap")));
      if (!blob) fail(ErrorCode::format, place + ": expected base64");
      add_normalizer(charsmap_step(std::make_shared<const Charsmap>(*blob, place)));
    } else if (type == "BertNormalizer") {
      BertNormalizerOptions options;
      options.clean_text = file_.boolean_or(fields, path, "clean_text", true);
      options.chinese = file_.boolean_or(fields, path, "handle_chinese_chars", true);
      options.lowercase = file_.boolean_or(fields, path, "lowercase", true);
      options.strip_accents = file_.boolean_or(fields, path, "strip_accents", options.lowercase);
      add_normalizer(bert_normalizer_step(options));
    } else if (type == "Nmt") {
      add_normalizer(nmt_step());
    } else if (type == "ByteLevel") {
      add_normalizer(byte_alphabet_step());
    } else if (type == "Sequence") {
      read_list(fields, path, "normalizers",
                [&](element part, const std::string& place) { read_normalizer(part, place); });
    } else {
      file_.fail_unknown(path, "normalizer", type,
                         "NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, "
                         "Precompiled, BertNormalizer, Nmt, ByteLevel, Sequence");
    }
  }

  // A step that the fast way knows.
  void add_scanner(PreTokenizerStep step, const std::string& path) {
    if (spec_.pre_tokenizer.steps.size() == PreTokenizer::kMaxSteps) simple_ = false;
    if (simple_) spec_.pre_tokenizer.steps.push_back(step);
    add_split(scanner_step(step), path);
  }
  void add_split(TextStepPtr step, const std::string& path) {
    if (byte_level_) simple_ = false;  // it sees the alphabet instead of bytes
    add(spec_.splits, step, path);
    spec_.alphabet_splits.push_back(std::move(step));
  }
  void add_other_split(TextStepPtr step, const std::string& path) {
    simple_ = false;
    add_split(std::move(step), path);
  }

  void read_pre_tokenizer(element value, const std::string& path) {
    using Kind = PreTokenizerStep::Kind;
    const auto [fields, type] = file_.typed(value, path);
    PreTokenizerStep step;
    if (type == "ByteLevel") {
      step.add_prefix_space = file_.boolean_or(fields, path, "add_prefix_space", true);
      step.kind = file_.boolean_or(fields, path, "use_regex", true) ? Kind::gpt2 : Kind::whole;
      // A step that changes nothing is none.
      if (step.add_prefix_space || step.kind != Kind::whole || spec_.pre_tokenizer.steps.empty())
        add_scanner(step, path);
      if (byte_level_) simple_ = false;
      byte_level_ = true;
      spec_.alphabet_splits.push_back(byte_alphabet_step());
    } else if (type == "Split") {
      read_split(fields, path);
    } else if (type == "Digits") {
      step.kind =
          file_.boolean_or(fields, path, "individual_digits", false) ? Kind::single_digits : Kind::digit_runs;
      add_scanner(step, path);
    } else if (type == "Metaspace") {
      const auto [replacement, scheme] = read_metaspace(fields, path);
      spec_.needs_origin = spec_.needs_origin || scheme == PrependScheme::first;
      add_other_split(metaspace_step(replacement, scheme, file_.boolean_or(fields, path, "split", true)),
                      path);
    } else if (type == "Whitespace") {
      add_other_split(whitespace_step(), path);
    } else if (type == "WhitespaceSplit") {
      add_other_split(whitespace_split_step(), path);
    } else if (type == "Punctuation") {
      add_other_split(punctuation_step(read_behavior(fields, path, "Isolated")), path);
    } else if (type == "BertPreTokenizer") {
      add_other_split(bert_pre_tokenizer_step(), path);
    } else if (type == "CharDelimiterSplit") {
      add_other_split(delimiter_step(decode_utf8(read_character(fields, path, "delimiter"), 0).value), path);
    } else if (type == "Sequence") {
      read_list(fields, path, "pretokenizers",
                [&](element part, const std::string& place) { read_pre_tokenizer(part, place); });
    } else {
      file_.fail_unknown(path, "pre-tokenizer", type,
                         "ByteLevel, Split, Digits, Metaspace, Whitespace, WhitespaceSplit, Punctuation, "
                         "BertPreTokenizer, CharDelimiterSplit, Sequence");
    }
  }

  std::pair<std::string, PrependScheme> read_metaspace(object fields, const std::string& path) const {
    const std::string_view name = file_.text_or(fields, path, "prepend_scheme", "always");
    PrependScheme scheme = PrependScheme::always;
    if (name == "first")
      scheme = PrependScheme::first;
    else if (name == "never")
      scheme = PrependScheme::never;
    else if (name != "always")
      file_.fail_at(child(path, "prepend_scheme"),
                    "expected always, first or never, got " + capstan::quoted(name));
    if (!file_.boolean_or(fields, path, "add_prefix_space", true)) {
      if (file_.member(fields, "prepend_scheme") && scheme != PrependScheme::never)
        file_.fail_at(path, "add_prefix_space is false, but prepend_scheme is " + capstan::quoted(name));
      scheme = PrependScheme::never;
    }
    return {read_character(fields, path, "replacement"), scheme};
  }

  SplitBehavior read_behavior(object fields, const std::string& path, std::string_view otherwise) const {
    const std::string_view behavior = file_.text_or(fields, path, "behavior", otherwise);
    if (behavior == "Removed") return SplitBehavior::removed;
    if (behavior == "Isolated") return SplitBehavior::isolated;
    if (behavior == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
    if (behavior == "MergedWithNext") return SplitBehavior::merged_with_next;
    if (behavior == "Contiguous") return SplitBehavior::contiguous;
    file_.fail_at(child(path, "behavior"), "unknown behavior " + capstan::quoted(behavior));
  }

  void read_split(object fields, const std::string& path) {
    using Kind = PreTokenizerStep::Kind;
    PreTokenizerStep step;
    step.behavior = read_behavior(fields, path, "");
    step.invert = file_.boolean_or(fields, path, "invert", false);
    bool is_regex = false;
    std::string text;
    step.pattern = read_pattern(fields, path, is_regex, text);
    // The known patterns match every character, so that what they leave out is nothing.
    const bool everything = (step.behavior == SplitBehavior::isolated) ||
                            (step.behavior == SplitBehavior::removed && step.invert);
    if (is_regex && everything && known_pattern(text, step.kind))
      step.pattern = nullptr;
    else
      step.kind = Kind::pattern;
    add_scanner(std::move(step), path);
  }

  DecoderStep& add_decoder(DecoderStep::Kind kind) {
    spec_.decoder->steps.push_back({});
    spec_.decoder->steps.back().kind = kind;
    return spec_.decoder->steps.back();
  }

  void read_decoder(element value, const std::string& path) {
    using Kind = DecoderStep::Kind;
    const auto [fields, type] = file_.typed(value, path);
    if (spec_.decoder->steps.size() == kMaxSteps)
      file_.fail_at(path, "there are more than " + std::to_string(kMaxSteps) + " steps",
                    ErrorCode::unsupported);
    if (type == "ByteLevel") {
      add_decoder(Kind::byte_level);
    } else if (type == "Metaspace") {
      const auto [replacement, scheme] = read_metaspace(fields, path);
      DecoderStep& step = add_decoder(Kind::metaspace);
      step.content = replacement;
      step.prepended = scheme != PrependScheme::never;
    } else if (type == "Replace") {
      bool is_regex = false;
      std::string text;
      auto pattern = read_pattern(fields, path, is_regex, text);
      DecoderStep& step = add_decoder(Kind::replace);
      step.pattern = std::move(pattern);
      step.content = read_content(fields, path, "content");
    } else if (type == "ByteFallback") {
      add_decoder(Kind::byte_fallback);
    } else if (type == "Fuse") {
      add_decoder(Kind::fuse);
    } else if (type == "Strip") {
      DecoderStep& step = add_decoder(Kind::strip);
      step.content = read_character(fields, path, "content");
      step.start = read_count(fields, path, "start");
      step.stop = read_count(fields, path, "stop");
    } else if (type == "WordPiece") {
      DecoderStep& step = add_decoder(Kind::word_piece);
      step.content = file_.text_or(fields, path, "prefix", "##");
      step.cleanup = file_.boolean_or(fields, path, "cleanup", true);
    } else if (type == "BPEDecoder") {
      add_decoder(Kind::bpe).content = file_.text_or(fields, path, "suffix", "</w>");
    } else if (type == "Sequence") {
      read_list(fields, path, "decoders",
                [&](element part, const std::string& place) { read_decoder(part, place); });
    } else {
      file_.fail_unknown(path, "decoder", type,
                         "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip, WordPiece, BPEDecoder, "
                         "Sequence");
    }
  }

  void read_post_processor(element value, const std::string& path) {
    const auto [fields, type] = file_.typed(value, path);
    PostStep step;
    if (type == "TemplateProcessing") {
      read_template(fields, path, step);
    } else if (type == "ByteLevel") {
      step.trim = file_.boolean_or(fields, path, "trim_offsets", true);
      step.add_prefix_space = file_.boolean_or(fields, path, "add_prefix_space", true);
    } else if (type == "RobertaProcessing" || type == "BertProcessing") {
      if (type == "RobertaProcessing") {
        step.trim = file_.boolean_or(fields, path, "trim_offsets", true);
        step.add_prefix_space = file_.boolean_or(fields, path, "add_prefix_space", true);
      }
      step.before.push_back(read_pair(fields, path, "cls"));
      step.after.push_back(read_pair(fields, path, "sep"));
    } else if (type == "Sequence") {
      read_list(fields, path, "processors",
                [&](element part, const std::string& place) { read_post_processor(part, place); });
      return;
    } else {
      file_.fail_unknown(path, "post-processor", type,
                         "ByteLevel, TemplateProcessing, RobertaProcessing, BertProcessing, Sequence");
    }
    if (spec_.post.size() == kMaxSteps)
      file_.fail_at(path, "there are more than " + std::to_string(kMaxSteps) + " steps",
                    ErrorCode::unsupported);
    spec_.post.push_back(std::move(step));
  }

  // ["[CLS]", 101]
  int32_t read_pair(object fields, const std::string& path, const char* key) const {
    const std::string place = child(path, key);
    const auto pair = file_.array(file_.needed(fields, path, key), place);
    if (pair.size() != 2) file_.fail_at(place, "expected a token and its id");
    file_.text(pair.at(0), child(place, size_t{0}));
    return file_.token_id(pair.at(1), child(place, 1));
  }

  void read_template(object fields, const std::string& path, PostStep& step) {
    const auto single = file_.member(fields, "single");
    if (!single) return;
    const std::string single_path = child(path, "single"), specials_path = child(path, "special_tokens");
    const auto specials = file_.member(fields, "special_tokens");
    bool seen = false;
    size_t index = 0;
    for (const element part : file_.array(*single, single_path)) {
      const std::string part_path = child(single_path, index++);
      const object piece = file_.object(part, part_path);
      if (const auto sequence = file_.member(piece, "Sequence")) {
        const std::string_view id = file_.text_or(file_.object(*sequence, part_path), part_path, "id", "A");
        if (id != "A" || seen)
          file_.fail_at(part_path, "expected the sequence A once", ErrorCode::unsupported);
        seen = true;
        continue;
      }
      const auto special = file_.member(piece, "SpecialToken");
      if (!special) file_.fail_at(part_path, "expected `Sequence` or `SpecialToken`");
      const std::string name(
          file_.text(file_.needed(file_.object(*special, part_path), part_path, "id"), part_path));
      if (!seen && !spec_.bos) spec_.bos = name;
      const auto token = specials ? file_.member(file_.object(*specials, specials_path), name) : std::nullopt;
      if (!token)
        file_.fail_at(part_path, "the token " + capstan::quoted(name) + " is not in `special_tokens`");
      const std::string ids_path = child(child(specials_path, name), "ids");
      size_t at = 0;
      for (const element id : file_.array(file_.needed(file_.object(*token, child(specials_path, name)),
                                                       child(specials_path, name), "ids"),
                                          ids_path))
        (seen ? step.after : step.before).push_back(file_.token_id(id, child(ids_path, at++)));
    }
    if (!seen) file_.fail_at(single_path, "the sequence A is missing", ErrorCode::unsupported);
  }

  const JsonFile& file_;
  TokenizerSpec& spec_;
  bool byte_level_ = false;
  bool simple_ = true;  // nothing but what the fast way knows
};

}  // namespace

void read_stages(const JsonFile& file, TokenizerSpec& spec) {
  StageReader(file, spec).read();
}

}  // namespace capstan::text

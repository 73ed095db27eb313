#include "formats/gguf_tokenizer.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "text/tokenizer/bpe_json.hpp"
#include "text/tokenizer/text_pieces.hpp"

namespace capstan::formats {

using Kind = GgufValue::Kind;

namespace {

OrderedJson pre_tokenizer_json(const PreTokenizer& pre) {
  const OrderedJson bytes = text::byte_level_json(false, true, pre.pattern == nullptr);
  if (pre.digits)
    return {{"type", "Sequence"},
            {"pretokenizers", {OrderedJson{{"type", "Digits"}, {"individual_digits", true}}, bytes}}};
  if (!pre.pattern) return bytes;
  return {{"type", "Sequence"}, {"pretokenizers", {text::split_json(*pre.pattern), bytes}}};
}

const GgufValue* find(const GgufMetadata& metadata, std::string_view key, Kind kind,
                      const std::string& file) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return nullptr;
  if (found->second.kind != kind)
    fail(ErrorCode::format, file + ": `" + std::string(key) + "` is of another type");
  return &found->second;
}

// Returns the merges of a vocabulary that is ordered by scores: every way to form a token of two tokens, the
// best token first.
std::vector<std::pair<std::string, std::string>> merges_of_scores(const std::vector<std::string>& tokens,
                                                                  const std::vector<double>& scores,
                                                                  const std::vector<int64_t>& types) {
  std::unordered_map<std::string_view, size_t> ids;
  for (size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], i);
  struct Merge {
    double score;
    size_t left, right;
  };
  std::vector<Merge> merges;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] != kNormal || tokens[i].size() > 256) continue;
    std::vector<Merge> here;
    for (size_t at = 1; at < tokens[i].size(); ++at) {
      const auto left = ids.find(std::string_view(tokens[i]).substr(0, at));
      if (left == ids.end()) continue;
      const auto right = ids.find(std::string_view(tokens[i]).substr(at));
      if (right != ids.end()) here.push_back({scores[i], left->second, right->second});
    }
    std::sort(here.begin(), here.end(), [](const Merge& a, const Merge& b) {
      return std::pair(a.left, a.right) < std::pair(b.left, b.right);
    });
    merges.insert(merges.end(), here.begin(), here.end());
  }
  std::stable_sort(merges.begin(), merges.end(),
                   [](const Merge& a, const Merge& b) { return a.score > b.score; });
  std::vector<std::pair<std::string, std::string>> result;
  for (const Merge& merge : merges) result.emplace_back(tokens[merge.left], tokens[merge.right]);
  return result;
}

std::optional<std::string> special(const GgufMetadata& metadata, const char* key) {
  const auto id = metadata.find(std::string("tokenizer.ggml.") + key + "_token_id");
  const auto tokens = metadata.find("tokenizer.ggml.tokens");
  if (id == metadata.end() || tokens == metadata.end() || id->second.kind != Kind::integer)
    return std::nullopt;
  const int64_t at = id->second.integer;
  if (at < 0 || at >= static_cast<int64_t>(tokens->second.texts.size())) return std::nullopt;
  return tokens->second.texts[static_cast<size_t>(at)];
}

bool is_true(const GgufMetadata& metadata, std::string_view key, bool otherwise) {
  const auto found = metadata.find(key);
  return found == metadata.end() || found->second.kind != Kind::boolean ? otherwise
                                                                        : found->second.integer != 0;
}

// A post-processor that prepends a token to every text.
OrderedJson beginning_with(const std::string& token, int64_t id) {
  const OrderedJson first = {{"SpecialToken", {{"id", token}, {"type_id", 0}}}};
  const auto sequence = [](const char* name, int type) {
    return OrderedJson{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  return {{"type", "TemplateProcessing"},
          {"single", {first, sequence("A", 0)}},
          {"pair", {first, sequence("A", 0), first, sequence("B", 1)}},
          {"special_tokens", {{token, {{"id", token}, {"ids", {id}}, {"tokens", {token}}}}}}};
}

text::BpeJson byte_level_bpe(const GgufMetadata& metadata, const std::string& file) {
  text::BpeJson bpe;
  const GgufValue* lines = find(metadata, "tokenizer.ggml.merges", Kind::texts, file);
  if (!lines) fail(ErrorCode::format, file + ": `tokenizer.ggml.merges` is missing");
  for (const std::string& line : lines->texts) {
    const size_t blank = line.find(' ', 1);
    if (blank == std::string::npos)
      fail(ErrorCode::format, file + ": `tokenizer.ggml.merges` has " + in_quotes(line) + ", not two tokens");
    bpe.merges.push_back({line.substr(0, blank), line.substr(blank + 1)});
  }
  const GgufValue* pre = find(metadata, "tokenizer.ggml.pre", Kind::text, file);
  const std::string name = !pre || pre->text == "default" ? "gpt-2" : pre->text;
  const auto found = std::find_if(kPreTokenizers.begin(), kPreTokenizers.end(),
                                  [&](const PreTokenizer& one) { return one.name == name; });
  if (found == kPreTokenizers.end())
    fail(ErrorCode::unsupported,
         file + ": `tokenizer.ggml.pre` is " + in_quotes(name) + ", which this version does not know",
         "take the tokenizer.json of the original model: tokenizer.tokenizer_model=FILE");
  bpe.pre_tokenizer = pre_tokenizer_json(*found);
  bpe.ignore_merges = found->ignores_merges;
  bpe.decoder = text::byte_level_json(true, true, true);
  return bpe;
}

text::BpeJson sentencepiece_bpe(const GgufMetadata& metadata, const std::vector<std::string>& tokens,
                                const std::vector<int64_t>& types, const std::string& file) {
  text::BpeJson bpe;
  const GgufValue* scores = find(metadata, "tokenizer.ggml.scores", Kind::reals, file);
  if (!scores || scores->reals.size() != tokens.size())
    fail(ErrorCode::format, file + ": `tokenizer.ggml.scores` is missing or of another length than `tokens`");
  for (auto& [left, right] : merges_of_scores(tokens, scores->reals, types))
    bpe.merges.push_back({left, right});
  const std::string blank(text::kMetaspace);
  OrderedJson steps = Json::array();
  if (is_true(metadata, "tokenizer.ggml.add_space_prefix", true))
    steps.push_back({{"type", "Prepend"}, {"prepend", blank}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", blank}});
  bpe.normalizer = {{"type", "Sequence"}, {"normalizers", steps}};
  bpe.byte_fallback = bpe.fuse_unk = true;
  if (const auto unknown = special(metadata, "unknown")) bpe.unk_token = *unknown;
  OrderedJson decoders = {{{"type", "Replace"}, {"pattern", {{"String", blank}}}, {"content", " "}},
                          {{"type", "ByteFallback"}},
                          {{"type", "Fuse"}}};
  if (steps.size() == 2) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  bpe.decoder = {{"type", "Sequence"}, {"decoders", decoders}};
  return bpe;
}

void add_vocabulary(const std::vector<std::string>& tokens, const std::vector<int64_t>& types,
                    text::BpeJson& bpe) {
  std::unordered_map<std::string_view, size_t> ids;
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != kUnused) ids[tokens[i]] = i;
    if (types[i] == kControl || types[i] == kUser || types[i] == kUnknown)
      bpe.add_token(static_cast<int64_t>(i), tokens[i], types[i] != kUser);
  }
  for (size_t i = 0; i < types.size(); ++i)
    if (types[i] != kUnused && ids[tokens[i]] == i) bpe.vocab.emplace_back(tokens[i], i);
}

}  // namespace

std::string tokenizer_json_of(const GgufMetadata& metadata, const std::string& file) {
  const GgufValue* tokens = find(metadata, "tokenizer.ggml.tokens", Kind::texts, file);
  const GgufValue* kind = find(metadata, "tokenizer.ggml.model", Kind::text, file);
  if (!tokens || !kind) return "";
  const GgufValue* given_types = find(metadata, "tokenizer.ggml.token_type", Kind::integers, file);
  const std::vector<int64_t> types =
      given_types ? given_types->integers : std::vector<int64_t>(tokens->texts.size(), kNormal);
  if (types.size() != tokens->texts.size())
    fail(ErrorCode::format, file + ": `tokenizer.ggml.token_type` and `tokens` differ in length");
  if (kind->text != "gpt2" && kind->text != "llama")
    fail(ErrorCode::unsupported,
         file + ": `tokenizer.ggml.model` is " + in_quotes(kind->text) + "; gpt2 and llama are read");
  text::BpeJson bpe = kind->text == "gpt2" ? byte_level_bpe(metadata, file)
                                           : sentencepiece_bpe(metadata, tokens->texts, types, file);
  add_vocabulary(tokens->texts, types, bpe);
  if (const auto begin = special(metadata, "bos");
      begin && is_true(metadata, "tokenizer.ggml.add_bos_token", false))
    bpe.post_processor = beginning_with(*begin, metadata.at("tokenizer.ggml.bos_token_id").integer);
  return dump_json(text::document(std::move(bpe)), 1) + "\n";
}

std::string tokenizer_config_of(const GgufMetadata& metadata) {
  OrderedJson config;
  for (const auto& [ours, theirs] : {std::pair{"bos_token", "bos"}, std::pair{"eos_token", "eos"},
                                     std::pair{"unk_token", "unknown"}, std::pair{"pad_token", "padding"}})
    if (const auto token = special(metadata, theirs)) config[ours] = *token;
  if (config.is_null()) return "";
  // This class uses tokenizer.json unchanged.
  config["tokenizer_class"] = "PreTrainedTokenizerFast";
  // Decoding does not change the text of the tokens.
  config["clean_up_tokenization_spaces"] = false;
  if (const auto family = metadata.find("general.architecture");
      family != metadata.end() && family->second.kind == Kind::text)
    if (const auto length = metadata.find(family->second.text + ".context_length");
        length != metadata.end() && length->second.kind == Kind::integer)
      config["model_max_length"] = length->second.integer;
  if (metadata.count("tokenizer.ggml.add_bos_token"))
    config["add_bos_token"] = is_true(metadata, "tokenizer.ggml.add_bos_token", false);
  const auto chat = metadata.find("tokenizer.chat_template");
  if (chat != metadata.end() && chat->second.kind == Kind::text) config["chat_template"] = chat->second.text;
  return dump_json(config, 2) + "\n";
}

std::string generation_config_of(const GgufMetadata& metadata) {
  const auto id_of = [&](const char* name) -> std::optional<int64_t> {
    if (!special(metadata, name)) return std::nullopt;
    return metadata.at(std::string("tokenizer.ggml.") + name + "_token_id").integer;
  };
  std::vector<int64_t> ends;
  for (const char* name : {"eos", "eot", "eom"})
    if (const auto id = id_of(name); id && std::find(ends.begin(), ends.end(), *id) == ends.end())
      ends.push_back(*id);
  if (ends.empty()) return "";
  OrderedJson settings;
  if (const auto bos = id_of("bos")) settings["bos_token_id"] = *bos;
  if (ends.size() == 1)
    settings["eos_token_id"] = ends[0];
  else
    settings["eos_token_id"] = ends;
  settings["pad_token_id"] = id_of("padding").value_or(ends[0]);
  return dump_json(settings, 2) + "\n";
}

}  // namespace capstan::formats

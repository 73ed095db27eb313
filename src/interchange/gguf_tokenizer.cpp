#include "interchange/gguf_tokenizer.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/strict_json.hpp"

namespace capstan::interchange {

using nlohmann::json;
using nlohmann::ordered_json;
using Kind = GgufValue::Kind;

namespace {

// Values of tokenizer.ggml.token_type.
constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUser = 4, kUnused = 5, kByte = 6;

constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// How llama.cpp names the ways in which a text is cut before the merges; it chooses its regular expression by the name.
struct PreTokenizer {
  const char* name;
  const char* pattern;  // null: ByteLevel's own
  bool digits;          // each by itself, before
};
constexpr std::array kPreTokenizers = {
    PreTokenizer{"llama-bpe", kLlama3, false}, PreTokenizer{"qwen2", kQwen2, false},
    PreTokenizer{"smollm", nullptr, true},     PreTokenizer{"gpt-2", nullptr, false},
    PreTokenizer{"llama3", kLlama3, false},    PreTokenizer{"llama-v3", kLlama3, false}};

ordered_json pre_tokenizer_json(const PreTokenizer& pre) {
  const ordered_json bytes = {{"type", "ByteLevel"},
                              {"add_prefix_space", false},
                              {"trim_offsets", true},
                              {"use_regex", pre.pattern == nullptr}};
  if (pre.digits)
    return {{"type", "Sequence"},
            {"pretokenizers", {ordered_json{{"type", "Digits"}, {"individual_digits", true}}, bytes}}};
  if (!pre.pattern) return bytes;
  return {{"type", "Sequence"},
          {"pretokenizers",
           {ordered_json{{"type", "Split"},
                         {"pattern", {{"Regex", pre.pattern}}},
                         {"behavior", "Isolated"},
                         {"invert", false}},
            bytes}}};
}

const GgufValue* find(const GgufMetadata& metadata, std::string_view key, Kind kind,
                      const std::string& file) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return nullptr;
  if (found->second.kind != kind)
    fail(ErrorCode::format, file + ": `" + std::string(key) + "` is of another type");
  return &found->second;
}

// Merges of a vocabulary whose order is in its scores: every way to make a token of two, the best token first.
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
    for (size_t cut = 1; cut < tokens[i].size(); ++cut) {
      const auto left = ids.find(std::string_view(tokens[i]).substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(std::string_view(tokens[i]).substr(cut));
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

  ordered_json model = {{"type", "BPE"},
                        {"dropout", nullptr},
                        {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr},
                        {"end_of_word_suffix", nullptr},
                        {"fuse_unk", false},
                        {"byte_fallback", false},
                        {"ignore_merges", false}};
  ordered_json added = json::array(), normalizer, pre_tokenizer, decoder;
  for (size_t i = 0; i < types.size(); ++i)
    if (types[i] == kControl || types[i] == kUser || types[i] == kUnknown)
      added.push_back({{"id", i},
                       {"content", tokens->texts[i]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", types[i] != kUser}});
  ordered_json vocabulary = ordered_json::object(), merges = json::array();
  for (size_t i = 0; i < types.size(); ++i)
    if (types[i] != kUnused) vocabulary[tokens->texts[i]] = i;

  if (kind->text == "gpt2") {
    const GgufValue* lines = find(metadata, "tokenizer.ggml.merges", Kind::texts, file);
    if (!lines) fail(ErrorCode::format, file + ": `tokenizer.ggml.merges` is missing");
    for (const std::string& line : lines->texts) {
      const size_t blank = line.find(' ', 1);
      if (blank == std::string::npos)
        fail(ErrorCode::format,
             file + ": `tokenizer.ggml.merges` has " + capstan::quoted(line) + ", not two tokens");
      merges.push_back({line.substr(0, blank), line.substr(blank + 1)});
    }
    const GgufValue* pre = find(metadata, "tokenizer.ggml.pre", Kind::text, file);
    const std::string name = !pre || pre->text == "default" ? "gpt-2" : pre->text;
    const auto found = std::find_if(kPreTokenizers.begin(), kPreTokenizers.end(),
                                    [&](const PreTokenizer& one) { return one.name == name; });
    if (found == kPreTokenizers.end())
      fail(ErrorCode::unsupported,
           file + ": `tokenizer.ggml.pre` is " + capstan::quoted(name) + ", which this version does not know",
           "take the tokenizer.json of the original model: tokenizer.tokenizer_model=FILE");
    pre_tokenizer = pre_tokenizer_json(*found);
    model["ignore_merges"] = found->pattern == kLlama3;
    decoder = {
        {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  } else if (kind->text == "llama") {
    const GgufValue* scores = find(metadata, "tokenizer.ggml.scores", Kind::reals, file);
    if (!scores || scores->reals.size() != tokens->texts.size())
      fail(ErrorCode::format,
           file + ": `tokenizer.ggml.scores` is missing or of another length than `tokens`");
    for (auto& [left, right] : merges_of_scores(tokens->texts, scores->reals, types))
      merges.push_back({left, right});
    const std::string blank = "\u2581";
    ordered_json steps = json::array();
    if (is_true(metadata, "tokenizer.ggml.add_space_prefix", true))
      steps.push_back({{"type", "Prepend"}, {"prepend", blank}});
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", blank}});
    normalizer = {{"type", "Sequence"}, {"normalizers", steps}};
    model["byte_fallback"] = true;
    model["fuse_unk"] = true;
    if (const auto unknown = special(metadata, "unknown")) model["unk_token"] = *unknown;
    ordered_json parts = {{{"type", "Replace"}, {"pattern", {{"String", blank}}}, {"content", " "}},
                          {{"type", "ByteFallback"}},
                          {{"type", "Fuse"}}};
    if (steps.size() == 2) parts.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    decoder = {{"type", "Sequence"}, {"decoders", parts}};
  } else {
    fail(ErrorCode::unsupported,
         file + ": `tokenizer.ggml.model` is " + capstan::quoted(kind->text) + "; gpt2 and llama are read");
  }
  model["vocab"] = std::move(vocabulary);
  model["merges"] = std::move(merges);
  const ordered_json whole = {
      {"version", "1.0"},          {"truncation", nullptr},    {"padding", nullptr},
      {"added_tokens", added},     {"normalizer", normalizer}, {"pre_tokenizer", pre_tokenizer},
      {"post_processor", nullptr}, {"decoder", decoder},       {"model", model}};
  return whole.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string tokenizer_config_of(const GgufMetadata& metadata) {
  ordered_json config;
  for (const auto& [ours, theirs] : {std::pair{"bos_token", "bos"}, std::pair{"eos_token", "eos"},
                                     std::pair{"unk_token", "unknown"}, std::pair{"pad_token", "padding"}})
    if (const auto token = special(metadata, theirs)) config[ours] = *token;
  if (config.is_null()) return "";
  if (metadata.count("tokenizer.ggml.add_bos_token"))
    config["add_bos_token"] = is_true(metadata, "tokenizer.ggml.add_bos_token", false);
  const auto chat = metadata.find("tokenizer.chat_template");
  if (chat != metadata.end() && chat->second.kind == Kind::text) config["chat_template"] = chat->second.text;
  return config.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

namespace {

// What cuts the text, as llama.cpp names it.
std::string pre_tokenizer_name(const json& pre) {
  bool digits = false, bytes = false;
  std::string pattern;
  const json steps = pre.is_object() && pre.value("type", "") == "Sequence"
                         ? pre.value("pretokenizers", json::array())
                         : json::array({pre});
  for (const json& step : steps) {
    const std::string type = step.is_object() ? step.value("type", "") : "";
    if (type == "Digits" && step.value("individual_digits", false))
      digits = true;
    else if (type == "Split" && step.contains("pattern") && step["pattern"].contains("Regex"))
      pattern = step["pattern"]["Regex"].get<std::string>();
    else if (type == "ByteLevel")
      bytes = true;
    else
      return "";
  }
  for (const PreTokenizer& one : kPreTokenizers)
    if (bytes && one.digits == digits && pattern == (one.pattern ? one.pattern : "")) return one.name;
  return bytes && !digits && pattern == kGpt2 ? "gpt-2" : "";
}

}  // namespace

std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer(std::string_view tokenizer_json,
                                                              std::string_view config,
                                                              const std::string& chat_template,
                                                              int64_t rows) {
  const std::string name = "tokenizer.json";
  const json parsed = checkpoint::parse_strict_json(tokenizer_json, name);
  const checkpoint::JsonView top(parsed, name), model = top.at("model");
  const auto unsupported = [&](const std::string& what) {
    fail(ErrorCode::unsupported, name + ": " + what + ": a GGUF file cannot hold this tokenizer");
  };
  if (model.at("type").string() != "BPE")
    unsupported("a model of type " + capstan::quoted(model.at("type").string()));
  const bool fallback = model.object().value("byte_fallback", false);

  GgufValue tokens, types, scores, merges;
  tokens.kind = merges.kind = Kind::texts;
  types.kind = Kind::integers;
  scores.kind = Kind::reals;
  for (int64_t i = 0; i < rows; ++i) tokens.texts.push_back("[PAD" + std::to_string(i) + "]");
  types.integers.assign(static_cast<size_t>(rows), kUnused);
  const auto put = [&](const std::string& token, int64_t id, int64_t type) {
    if (id >= rows)
      unsupported("the token " + capstan::quoted(token) + " has id " + std::to_string(id) + " of " +
                  std::to_string(rows));
    tokens.texts[static_cast<size_t>(id)] = token;
    types.integers[static_cast<size_t>(id)] = type;
  };
  std::map<std::string, int64_t, std::less<>> ids;
  const auto vocabulary = model.at("vocab");
  for (const auto& [token, id] : vocabulary.object().items()) {
    const bool byte = fallback && token.size() == 6 && token.starts_with("<0x") && token.ends_with(">");
    ids[token] = vocabulary.item(token, id).count();
    put(token, ids[token], byte ? kByte : kNormal);
  }
  const json unknown = model.object().value("unk_token", json());
  const std::string unknown_token = unknown.is_string() ? unknown.get<std::string>() : "";
  if (parsed.contains("added_tokens")) {
    const auto added = top.at("added_tokens");
    for (size_t i = 0; i < added.array().size(); ++i) {
      const auto one = added.item(i, added.array()[i]);
      const std::string& token = one.at("content").string();
      ids[token] = one.at("id").count();
      const bool special_token = one.object().value("special", false);
      put(token, ids[token], token == unknown_token ? kUnknown : special_token ? kControl : kUser);
    }
  }
  const auto listed = model.at("merges");
  double rank = 0;
  std::map<std::string, double, std::less<>> made;
  for (const json& merge : listed.array()) {
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

  std::vector<std::pair<std::string, GgufValue>> result;
  const auto add = [&](const std::string& key, GgufValue value) {
    result.emplace_back("tokenizer.ggml." + key, std::move(value));
  };
  if (fallback) {
    add("model", gguf_text("llama"));
    add("pre", gguf_text("default"));
    for (const std::string& token : tokens.texts) {
      const auto found = made.find(token);
      scores.reals.push_back(found == made.end() ? 0 : found->second);
    }
    add("tokens", std::move(tokens));
    add("scores", std::move(scores));
    add("token_type", std::move(types));
    add("add_space_prefix", gguf_boolean(tokenizer_json.find("\"Prepend\"") != std::string_view::npos));
  } else {
    const std::string pre = pre_tokenizer_name(parsed.value("pre_tokenizer", json()));
    if (pre.empty()) unsupported("`pre_tokenizer` is none that llama.cpp has a name for");
    add("model", gguf_text("gpt2"));
    add("pre", gguf_text(pre));
    add("tokens", std::move(tokens));
    add("token_type", std::move(types));
    add("merges", std::move(merges));
  }
  const json settings =
      config.empty() ? json::object() : checkpoint::parse_strict_json(config, "tokenizer_config.json");
  for (const auto& [theirs, ours] : {std::pair{"bos", "bos_token"}, std::pair{"eos", "eos_token"},
                                     std::pair{"unknown", "unk_token"}, std::pair{"padding", "pad_token"}}) {
    if (!settings.contains(ours)) continue;
    const json token = settings[ours].is_object() ? settings[ours].value("content", json()) : settings[ours];
    if (token.is_string())
      if (const auto id = ids.find(token.get<std::string>()); id != ids.end())
        add(std::string(theirs) + "_token_id", gguf_integer(id->second));
  }
  if (settings.contains("add_bos_token") && settings["add_bos_token"].is_boolean())
    add("add_bos_token", gguf_boolean(settings["add_bos_token"].get<bool>()));
  std::string chat = chat_template;
  if (chat.empty() && settings.contains("chat_template") && settings["chat_template"].is_string())
    chat = settings["chat_template"];
  if (!chat.empty()) result.emplace_back("tokenizer.chat_template", gguf_text(chat));
  return result;
}

}  // namespace capstan::interchange

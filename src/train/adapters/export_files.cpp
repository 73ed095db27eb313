#include "train/adapters/export_files.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "data/chat_prompt.hpp"
#include "data/sft_encode.hpp"
#include "formats/hf_directory.hpp"
#include "train/adapters/base_model.hpp"
#include "train/setup/state.hpp"
#include "train/setup/tokenizer.hpp"

namespace capstan::train {

using formats::Assets;

namespace {

constexpr const char *kTokenizerConfig = "tokenizer_config.json",
                     *kGenerationConfig = "generation_config.json", *kChatTemplate = "chat_template.jinja";

const std::string* find(const Assets& files, std::string_view name) {
  for (const auto& [file, text] : files)
    if (file == name) return &text;
  return nullptr;
}
void put(Assets& files, const char* name, std::string text) {
  for (auto& file : files)
    if (file.first == name) {
      file.second = std::move(text);
      return;
    }
  files.emplace_back(name, std::move(text));
}
// Null where the file is missing or no object.
OrderedJson object_in(const Assets& files, const char* name) {
  const std::string* text = find(files, name);
  OrderedJson parsed = text ? ordered_json_of(*text, IfNotJson::discard) : OrderedJson();
  return parsed.is_object() ? parsed : OrderedJson();
}
std::string text_of(const OrderedJson& json) {
  return dump_json(json, 2) + "\n";
}

// The tokenizer that the recipe names, for a checkpoint without its files
// (checkpoint.save_tokenizer_assets=false). Null unless it is still the one that the run was trained with.
std::shared_ptr<const text::Tokenizer> named_tokenizer(const config::Config& config,
                                                       const checkpoint::Reader& reader) {
  const auto record = train::tokenizer_of(reader);
  try {
    const auto tokenizer = load_tokenizer(config);
    return record && record->identity == tokenizer->identity() ? tokenizer : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

// Returns the tokenizer of a checkpoint, and adds its files where the checkpoint has none.
std::shared_ptr<const text::Tokenizer> add_tokenizer(const config::Config& config, Assets& files,
                                                     const checkpoint::Reader& reader) {
  if (config.tokenizer.tokenizer_type == config::TokenizerKind::none) return nullptr;
  if (config.tokenizer.tokenizer_type == config::TokenizerKind::byte) {
    put(files, "tokenizer.json", text::byte_tokenizer()->files()[0].text);
    return text::byte_tokenizer();
  }
  const bool here = std::any_of(files.begin(), files.end(),
                                [](const auto& file) { return formats::is_tokenizer_file(file.first); });
  if (here) return text::Tokenizer::from_texts(files, reader.description());
  auto tokenizer = named_tokenizer(config, reader);
  if (tokenizer)
    for (const auto& file : tokenizer->files())
      put(files, file.name.c_str(), file.path.empty() ? file.text : read_file(file.path));
  return tokenizer;
}

std::shared_ptr<const text::chat::ChatTemplate> template_of(const config::Config& config,
                                                            const text::Tokenizer& tokenizer) {
  const auto& chosen = config.tokenizer.chat_template;
  std::error_code unknown;
  // The recipe's file may be gone since; the checkpoint has a copy then.
  if (!chosen || names_known_template(*chosen) || std::filesystem::exists(chosen->resolved, unknown))
    return chat_template_of(config, tokenizer);
  return data::own_chat_template(tokenizer);
}

struct SpecialTokens {
  std::optional<int32_t> bos, eos, pad;
  // Every token that ends a text, eos first.
  std::vector<int32_t> ends;
};

SpecialTokens special_tokens(const config::Config& config, const text::Tokenizer& tokenizer,
                             const text::chat::ChatTemplate* chat) {
  SpecialTokens tokens;
  const auto eod = end_of_document(config, tokenizer);
  // An ordinary word may end documents. Other programs would make a named token a special one, and split the
  // word from the text around it, so that it is among the ids that end a text only.
  const auto named = eod && tokenizer.is_special(*eod) ? eod : std::nullopt;
  tokens.eos = tokenizer.eos() ? tokenizer.eos() : named;
  // In the training data the token that ends a document also precedes the next one, so it serves as BOS.
  tokens.bos = tokenizer.bos() ? tokenizer.bos() : named;
  tokens.pad = tokenizer.pad();
  const auto add = [&](std::optional<int32_t> id) {
    if (id && std::find(tokens.ends.begin(), tokens.ends.end(), *id) == tokens.ends.end())
      tokens.ends.push_back(*id);
  };
  add(tokens.eos);
  add(eod);
  if (chat) {
    try {
      add(data::chat_prompt(tokenizer, *chat, eod, "", "text").end_token);
    } catch (const Error& error) {
      // The template rejects a conversation of this form.
      if (error.code() != ErrorCode::format) throw;
    }
  }
  return tokens;
}

// The class of Transformers that reads the files as they are.
const char* tokenizer_class(const Assets& files) {
  if (find(files, "tokenizer.json")) return "PreTrainedTokenizerFast";
  if (find(files, "tokenizer.model")) return "LlamaTokenizer";
  return find(files, "vocab.txt") ? "BertTokenizer" : "GPT2Tokenizer";
}

void add_tokenizer_config(const config::Config& config, const text::Tokenizer& tokenizer,
                          const SpecialTokens& tokens, Assets& files) {
  OrderedJson json = object_in(files, kTokenizerConfig);
  const bool made = json.is_null();
  bool changed = made;
  if (made) {
    json["tokenizer_class"] = tokenizer_class(files);
    json["model_max_length"] = config.model.max_position_embeddings.value_or(config.model.seq_length);
    json["clean_up_tokenization_spaces"] = false;
    if (find(files, "tokenizer.model") && !find(files, "tokenizer.json"))
      json["add_bos_token"] = !tokenizer.before().empty(), json["add_eos_token"] = false;
  }
  const auto name = [&](const char* key, std::optional<int32_t> id) {
    if (!id || (json.contains(key) && !json[key].is_null())) return;
    json[key] = tokenizer.token_of(*id);
    changed = true;
  };
  name("bos_token", tokens.bos);
  name("eos_token", tokens.eos);
  name("pad_token", tokens.pad);
  name("unk_token", tokenizer.unk());
  // A template of the recipe replaces it.
  if (find(files, kChatTemplate) && config.tokenizer.chat_template && json.erase("chat_template") > 0)
    changed = true;
  if (changed) put(files, kTokenizerConfig, text_of(json));
}

void add_generation_config(const config::Config& config, const SpecialTokens& tokens, Assets& files) {
  if (tokens.ends.empty()) return;
  OrderedJson json = object_in(files, kGenerationConfig);
  std::vector<int32_t> ends = tokens.ends;
  if (!json.is_null()) {
    // Settings that came with the first weights hold, but answers may have got an end that these did not
    // have.
    if (!config.tokenizer.chat_template && config.dataset.kind != config::DatasetKind::sft) return;
    const OrderedJson kept = json.contains("eos_token_id") ? json["eos_token_id"] : OrderedJson();
    std::vector<int32_t> all;
    for (const auto& id : kept.is_array() ? kept : OrderedJson::array({kept}))
      if (id.is_number_integer()) all.push_back(id.get<int32_t>());
    const size_t before = all.size();
    for (const int32_t id : ends)
      if (std::find(all.begin(), all.end(), id) == all.end()) all.push_back(id);
    if (all.size() == before) return;
    ends = std::move(all);
  } else {
    json["bos_token_id"] = tokens.bos ? OrderedJson(*tokens.bos) : OrderedJson(nullptr);
    json["eos_token_id"] = nullptr;
    json["pad_token_id"] = tokens.pad.value_or(ends[0]);
  }
  if (ends.size() == 1)
    json["eos_token_id"] = ends[0];
  else
    json["eos_token_id"] = ends;
  put(files, kGenerationConfig, text_of(json));
}

}  // namespace

Assets export_files(const checkpoint::Reader& reader, const config::Config& config) {
  Assets files = assets_in(reader);
  if (reader.info().run_id == formats::kImportedRun) return files;
  const auto tokenizer = add_tokenizer(config, files, reader);
  if (!tokenizer) return files;
  const auto chat = template_of(config, *tokenizer);
  if (chat && config.tokenizer.chat_template) put(files, kChatTemplate, chat->text());
  const SpecialTokens tokens = special_tokens(config, *tokenizer, chat.get());
  add_tokenizer_config(config, *tokenizer, tokens, files);
  add_generation_config(config, tokens, files);
  return files;
}

std::string turn_end_problem(const checkpoint::Reader& reader, const config::Config& config) {
  if (reader.info().run_id == formats::kImportedRun) return {};
  Assets files = assets_in(reader);
  const auto tokenizer = add_tokenizer(config, files, reader);
  const auto chat = tokenizer ? template_of(config, *tokenizer) : nullptr;
  return chat ? data::turn_end_problem(*tokenizer, *chat, end_of_document(config, *tokenizer))
              : std::string();
}

}  // namespace capstan::train

#include "train/setup/tokenizer.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "checkpoint/store.hpp"
#include "config/core/external.hpp"
#include "data/sft_encode.hpp"
#include "formats/external_model.hpp"
#include "text/chat/chat_template.hpp"
#include "train/records/run_list.hpp"
#include "train/setup/state.hpp"

namespace capstan::train {

namespace {
text::PreTokenizerChoice choice_of(config::PreTokenizer pre_tokenizer) {
  switch (pre_tokenizer) {
    case config::PreTokenizer::gpt2:
      break;
    case config::PreTokenizer::llama3:
      return text::PreTokenizerChoice::llama3;
    case config::PreTokenizer::qwen:
      return text::PreTokenizerChoice::qwen2;
  }
  return text::PreTokenizerChoice::gpt2;
}
}  // namespace

std::shared_ptr<const text::Tokenizer> load_tokenizer_files(const std::string& name) {
  if (name.starts_with("hf:")) return text::Tokenizer::load(name.substr(3));
  // The checkpoints of a run have its tokenizer.
  if (records::is_run(name))
    return text::Tokenizer::load(checkpoint::resolve_checkpoint(records::saved_in(name)).path.string());
  if (!config::is_external_model("model", name)) {
    std::error_code unknown;
    const bool exists = std::filesystem::exists(name, unknown);
    // The name of the preset.
    if (name == "byte" && !exists) return text::Tokenizer::load("bytes");
    if (name != "bytes" && !exists && !unknown)
      fail_not_found("tokenizer", name,
                     "name a tokenizer.json, a SentencePiece .model, the directory of a model or run, or the "
                     "word `bytes`");
    return text::Tokenizer::load(name);
  }
  const auto files = formats::ExternalModel::open(name)->assets();
  if (std::none_of(files.begin(), files.end(),
                   [](const auto& file) { return file.first == "tokenizer.json"; }))
    fail(ErrorCode::not_found, "`" + name + "` holds no tokenizer",
         "tokenizer.tokenizer_model=FILE, a tokenizer.json or a SentencePiece .model");
  return text::Tokenizer::from_texts(files, name);
}

std::string tokenizer_name(const config::TokenizerConfig& tokenizer) {
  switch (tokenizer.tokenizer_type) {
    case config::TokenizerKind::none:
      break;
    case config::TokenizerKind::byte:
      return "bytes";
    case config::TokenizerKind::huggingface:
    case config::TokenizerKind::sentencepiece:
      return tokenizer.tokenizer_model ? tokenizer.tokenizer_model->text : "";
    case config::TokenizerKind::gpt2_bpe:
      return tokenizer.vocab_file ? tokenizer.vocab_file->text : "";
  }
  return {};
}

std::shared_ptr<const text::Tokenizer> load_tokenizer(const config::Config& config) {
  const config::TokenizerConfig& t = config.tokenizer;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  switch (t.tokenizer_type) {
    case config::TokenizerKind::none:
      return nullptr;
    case config::TokenizerKind::byte:
      tokenizer = text::byte_tokenizer();
      break;
    case config::TokenizerKind::huggingface:
    case config::TokenizerKind::sentencepiece:
      if (!t.tokenizer_model)
        fail(ErrorCode::config, "tokenizer.tokenizer_model is not given",
             "tokenizer.tokenizer_model=path/to/tokenizer.json");
      tokenizer = load_tokenizer_files(t.tokenizer_model->resolved);
      break;
    case config::TokenizerKind::gpt2_bpe: {
      if (!t.vocab_file || !t.merge_file)
        fail(ErrorCode::config, "tokenizer.vocab_file and tokenizer.merge_file are not both given");
      tokenizer = text::Tokenizer::load_pair(t.vocab_file->resolved, t.merge_file->resolved,
                                             choice_of(t.pre_tokenizer));
      break;
    }
  }
  if (config.model.vocab_size > 0 && tokenizer->vocab_size() > config.model.vocab_size)
    fail(ErrorCode::config,
         "the tokenizer has " + std::to_string(tokenizer->vocab_size()) + " tokens, the model's vocabulary " +
             std::to_string(config.model.vocab_size),
         "model.vocab_size=" + std::to_string(tokenizer->vocab_size()));
  return tokenizer;
}

void require_own_tokenizer(const config::Config& config, const text::Tokenizer& tokenizer,
                           const checkpoint::Reader& reader) {
  const auto own = tokenizer_of(reader);
  const auto now = data::record_of(tokenizer, tokenizer_name(config.tokenizer));
  if (!own || own->identity == now.identity) return;
  const bool copied = own->name == reader.directory().string();
  fail(ErrorCode::failed,
       "the run was trained with the tokenizer " + data::to_text(*own) + ", not with " + data::to_text(now),
       copied ? "tokenizer.tokenizer_model=" + own->name + " is the run's own"
              : "tokenizer.tokenizer_model=FILE names the run's own; checkpoint.save_tokenizer_assets=true "
                "would have kept it with the checkpoint");
}

void require_adapter_tokenizer(const config::Config& config, const text::Tokenizer& tokenizer,
                               const checkpoint::Reader& reader, const std::string& name) {
  const auto own = tokenizer_of(reader);
  const auto now = data::record_of(tokenizer, tokenizer_name(config.tokenizer));
  if (!own || own->identity == now.identity) return;
  fail(ErrorCode::failed,
       "the adapters `" + name + "` were trained with the tokenizer " + data::to_text(*own) +
           ", not with the base's, " + data::to_text(now),
       "name `" + name + "` {as_model}: it is loaded with its own tokenizer and its base");
}

void require_eod_token(const config::Config& config, const text::Tokenizer& tokenizer) {
  const std::string& token = config.tokenizer.eod_token;
  if (token != config::TokenizerConfig().eod_token && !tokenizer.id_of(token))
    fail(ErrorCode::config, "the tokenizer has no token `" + token + "` (tokenizer.eod_token)",
         "leave it out for the end-of-document token of the tokenizer itself");
}

std::optional<int32_t> end_of_document(const config::Config& config, const text::Tokenizer& tokenizer) {
  const auto named = tokenizer.id_of(config.tokenizer.eod_token);
  return named ? named : tokenizer.eod();
}

// A stored recipe has the absolute path of its directory before the name.
bool names_known_template(const config::Path& chosen) {
  const std::filesystem::path text = chosen.text;
  const std::string name = text.filename().string();
  const auto known = text::chat::known_templates();
  std::error_code unknown;
  return !std::filesystem::exists(chosen.resolved, unknown) &&
         (text.is_absolute() || !text.has_parent_path()) &&
         std::any_of(known.begin(), known.end(), [&](const auto& one) { return one.name == name; });
}

std::shared_ptr<const text::chat::ChatTemplate> chat_template_of(const config::Config& config,
                                                                 const text::Tokenizer& tokenizer) {
  const auto& chosen = config.tokenizer.chat_template;
  if (!chosen) return data::own_chat_template(tokenizer);
  return text::chat::ChatTemplate::load(names_known_template(*chosen)
                                            ? std::filesystem::path(chosen->text).filename().string()
                                            : chosen->resolved);
}

}  // namespace capstan::train

#include "data/document_ends.hpp"

#include "base/error.hpp"
#include "data/dataset_meta.hpp"

namespace capstan::data {

std::string check_document_ends(const IndexedDataset& dataset, const DocumentOptions& documents,
                                const text::Tokenizer* tokenizer) {
  const char* const field = documents.reads_eod();
  if (!documents.eod) return "";
  const auto named = [&](int64_t id) {
    const auto token = static_cast<int32_t>(id);
    const bool known = tokenizer && token < tokenizer->vocab_size();
    return (known ? "`" + std::string(tokenizer->token_of(token)) + "` (" : "(") + std::to_string(id) + ")";
  };
  const std::string name = "dataset `" + dataset.prefix() + "`";
  const std::string switch_off = field ? std::string(field) + "=false" : std::string(),
                    remedy = "{append_eod}, or set " + switch_off;
  const auto recorded = [&]() -> std::optional<int64_t> {
    const auto meta = read_meta(dataset);
    return meta ? meta->end_of_document : std::nullopt;
  }();

  if (!recorded) {
    if (field && dataset.tokens() > 0 &&
        !dataset.contains_token(*documents.eod, TokenizerCheck::kScannedTokens))
      fail(ErrorCode::config,
           std::string(field) + " has no effect on " + name +
               ": no token of it is the end-of-document token " + named(*documents.eod),
           "name the token that ends its documents with tokenizer.eod_token, " + remedy);
    return "";
  }
  if (*recorded == DatasetMeta::kNone) {
    if (field)
      fail(ErrorCode::config,
           std::string(field) + " has no effect on " + name +
               ": it was prepared without end-of-document tokens",
           remedy);
    return "";
  }
  if (*recorded == *documents.eod) return "";
  const std::string differs = "the documents of " + name + " end with " + named(*recorded) +
                              ", but the run's end-of-document token is " + named(*documents.eod);
  const std::string other =
      tokenizer && *recorded < tokenizer->vocab_size()
          ? "set tokenizer.eod_token=" + std::string(tokenizer->token_of(static_cast<int32_t>(*recorded)))
          : "prepare the text again with the run's tokenizer";
  if (field) fail(ErrorCode::config, differs + " (" + field + " is true)", other + ", or set " + switch_off);
  return differs + "; " + other;
}

}  // namespace capstan::data

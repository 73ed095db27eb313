#include "data/dataset_meta.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "data/indexed_dataset.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::data {

namespace {

constexpr const char* kSchema = "capstan.dataset_meta/1";
constexpr uint64_t kMaxBytes = 64 << 10;
constexpr size_t kMaxName = 4096;
const char* const kPrepareAgain =
    "prepare the data again, or remove this file: without it token ids are checked alone";

const Json& member(const Json& object, const char* key, const std::string& path) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end())
    fail(ErrorCode::format, path + ": no `" + key + "`", kPrepareAgain);
  return *found;
}

std::string text_of(const Json& object, const char* key, const std::string& path) {
  const auto& value = member(object, key, path);
  if (!value.is_string()) fail(ErrorCode::format, path + ": `" + key + "` is not a text", kPrepareAgain);
  return value.get<std::string>();
}

int64_t count_of(const Json& object, const char* key, int64_t most, const std::string& path) {
  const auto& value = member(object, key, path);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(most))
    fail(ErrorCode::format, path + ": `" + key + "` is not a number from 0 to " + std::to_string(most),
         kPrepareAgain);
  return value.get<int64_t>();
}

}  // namespace

TokenizerRecord record_of(const text::Tokenizer& tokenizer, std::string name) {
  name.resize(std::min(name.size(), kMaxName));
  return {std::move(name), tokenizer.identity(), tokenizer.vocab_size()};
}

std::string to_text(const TokenizerRecord& record) {
  return in_quotes(record.name) + " (" + with_separators(record.vocab_size) + " tokens, " +
         record.identity.substr(0, 8) + ")";
}

std::string meta_path(const std::string& prefix) {
  return prefix + ".meta.json";
}

std::string to_json(const DatasetMeta& meta) {
  OrderedJson json;
  json["schema"] = kSchema;
  json["tokenizer"] = {{"name", meta.tokenizer.name},
                       {"vocab_size", meta.tokenizer.vocab_size},
                       {"identity", meta.tokenizer.identity}};
  json["documents"] = meta.documents;
  json["sequences"] = meta.sequences;
  json["tokens"] = meta.tokens;
  if (meta.end_of_document)
    json["end_of_document"] = *meta.end_of_document == DatasetMeta::kNone
                                  ? OrderedJson(nullptr)
                                  : OrderedJson(*meta.end_of_document);
  return dump_json(json, 2) + "\n";
}

DatasetMeta parse_meta(std::string_view text, const std::string& path) {
  const auto json = json_of(text, IfNotJson::discard);
  if (!json.is_object()) fail(ErrorCode::format, path + ": not a JSON object", kPrepareAgain);
  if (const std::string schema = text_of(json, "schema", path); schema != kSchema)
    fail(ErrorCode::format, path + ": schema " + in_quotes(schema.substr(0, 64)) + " is not " + kSchema,
         kPrepareAgain);
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  DatasetMeta meta;
  const auto& tokenizer = member(json, "tokenizer", path);
  meta.tokenizer.name = text_of(tokenizer, "name", path);
  meta.tokenizer.identity = text_of(tokenizer, "identity", path);
  meta.tokenizer.vocab_size = count_of(tokenizer, "vocab_size", int64_t{1} << 31, path);
  const std::string& identity = meta.tokenizer.identity;
  if (identity.size() != 32 || identity.find_first_not_of("0123456789abcdef") != std::string::npos)
    fail(ErrorCode::format, path + ": `identity` is not 32 hexadecimal digits", kPrepareAgain);
  if (meta.tokenizer.name.size() > kMaxName)
    fail(ErrorCode::format, path + ": `name` has more than " + std::to_string(kMaxName) + " bytes",
         kPrepareAgain);
  meta.documents = count_of(json, "documents", kNoLimit, path);
  meta.sequences = count_of(json, "sequences", kNoLimit, path);
  meta.tokens = count_of(json, "tokens", kNoLimit, path);
  if (const auto end = json.find("end_of_document"); end != json.end())
    meta.end_of_document =
        end->is_null() ? DatasetMeta::kNone : count_of(json, "end_of_document", int64_t{1} << 31, path);
  return meta;
}

std::optional<DatasetMeta> read_meta(const IndexedDataset& dataset) {
  const std::string path = meta_path(dataset.prefix());
  std::error_code unknown;
  if (!std::filesystem::exists(path, unknown)) return std::nullopt;
  DatasetMeta meta = parse_meta(read_file(path, kMaxBytes), path);
  const std::pair<const char*, std::pair<int64_t, int64_t>> counts[] = {
      {"documents", {meta.documents, dataset.documents()}},
      {"sequences", {meta.sequences, dataset.sequences()}},
      {"tokens", {meta.tokens, dataset.tokens()}}};
  for (const auto& [what, count] : counts)
    if (count.first != count.second)
      fail(ErrorCode::format,
           path + ": it describes other data, with " + std::to_string(count.first) + " " + what + ", but `" +
               dataset.prefix() + "` has " + std::to_string(count.second),
           kPrepareAgain);
  return meta;
}

TokenizerCheck::TokenizerCheck(const text::Tokenizer* tokenizer, std::string name, int64_t model_vocab_size)
    : tokenizer_(tokenizer),
      name_(std::move(name)),
      model_vocab_size_(model_vocab_size),
      limit_(model_vocab_size) {
  if (tokenizer && (limit_ == 0 || tokenizer->vocab_size() < limit_)) limit_ = tokenizer->vocab_size();
}

void TokenizerCheck::check_vocabulary_gap(const IndexedDataset& dataset) const {
  const int64_t size = tokenizer_->vocab_size(), gap = model_vocab_size_ - size;
  if (gap * 100 <= model_vocab_size_) return;
  for (int64_t multiple = 2; multiple <= kMaxMultiple; multiple *= 2)
    if (model_vocab_size_ == round_up(size, multiple)) return;
  fail(ErrorCode::config,
       "the tokenizer " + in_quotes(name_) + " has " + with_separators(size) +
           " tokens, model.vocab_size is " + with_separators(model_vocab_size_) + ", and no record beside `" +
           dataset.prefix() + "` names the tokenizer of the data",
       "set model.vocab_size=" + std::to_string(size) +
           ", or {prepare_again}, which records its tokenizer in " + meta_path(dataset.prefix()));
}

void TokenizerCheck::check(const IndexedDataset& dataset) {
  const auto meta = read_meta(dataset);
  if (!meta) {
    if (!tokenizer_) return;
    check_vocabulary_gap(dataset);
    // Throws for a token at or above the limit.
    dataset.largest_token(kScannedTokens);
    return;
  }
  const TokenizerRecord& made = meta->tokenizer;
  if (!tokenizer_) {
    if (model_vocab_size_ > 0 && made.vocab_size > model_vocab_size_)
      fail(ErrorCode::config,
           "dataset `" + dataset.prefix() + "` was prepared with the tokenizer " + to_text(made) +
               ", larger than the model's vocabulary of " + with_separators(model_vocab_size_),
           "model.vocab_size=" + std::to_string(made.vocab_size));
    if (!record_) record_ = made;
    if (record_->identity != made.identity)
      fail(ErrorCode::config,
           "dataset `" + dataset.prefix() + "` was prepared with the tokenizer " + to_text(made) +
               ", another dataset of the run with " + to_text(*record_),
           "prepare the text of all of them with one tokenizer");
    return;
  }
  if (!record_) record_ = record_of(*tokenizer_, name_);
  if (record_->identity == made.identity) return;
  fail(ErrorCode::config,
       "dataset `" + dataset.prefix() + "` was prepared with the tokenizer " + to_text(made) + ", not with " +
           to_text(*record_),
       "use the tokenizer that the data was prepared with, or {prepare_again} (" +
           meta_path(dataset.prefix()) + " is the record)");
}

}  // namespace capstan::data

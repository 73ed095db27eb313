#include "data/indexed_writer.hpp"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <vector>

#include "base/error.hpp"
#include "data/random_file.hpp"

namespace capstan::data {

namespace {

constexpr size_t kSpoolBuffer = 64 << 10;

template <class T>
void put(FileWriter& file, T value) {
  file.write(std::as_bytes(std::span(&value, 1)));
}

void rename_over(const std::string& from, const std::string& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  if (error) fail(ErrorCode::io, "cannot rename `" + from + "` to `" + to + "`: " + error.message());
}

}  // namespace

bool append_token(std::string& out, TokenType type, int32_t token) {
  const auto put_as = [&](auto value) {
    if (static_cast<int64_t>(value) != token) return false;
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  };
  if (token < 0) return false;
  switch (type) {
    case TokenType::u8:
      return put_as(static_cast<uint8_t>(token));
    case TokenType::i8:
      return put_as(static_cast<int8_t>(token));
    case TokenType::i16:
      return put_as(static_cast<int16_t>(token));
    case TokenType::u16:
      return put_as(static_cast<uint16_t>(token));
    case TokenType::i32:
      return put_as(token);
    case TokenType::i64:
      return put_as(static_cast<int64_t>(token));
    default:
      return false;
  }
}

IndexedWriter::IndexedWriter(std::string prefix, TokenType type)
    : prefix_(std::move(prefix)), suffix_(".tmp." + std::to_string(::getpid())), type_(type) {
  CAPSTAN_ASSERT(type != TokenType::f32 && type != TokenType::f64, "tokens are integers");
  try {
    bin_ = std::make_unique<FileWriter>(prefix_ + ".bin" + suffix_);
    lengths_ = std::make_unique<FileWriter>(prefix_ + ".lengths" + suffix_, kSpoolBuffer);
    boundaries_ = std::make_unique<FileWriter>(prefix_ + ".documents" + suffix_, kSpoolBuffer);
  } catch (...) {
    remove_temporaries();
    throw;
  }
  put(*boundaries_, int64_t{0});
}

IndexedWriter::~IndexedWriter() {
  if (bin_) remove_temporaries();
}

void IndexedWriter::remove_temporaries() noexcept {
  for (const char* part : {".bin", ".lengths", ".documents", ".idx"})
    ::unlink((prefix_ + part + suffix_).c_str());
}

void IndexedWriter::add_document(std::span<const int32_t> tokens, std::span<const int32_t> sequence_lengths) {
  std::string encoded;
  encoded.reserve(tokens.size() * static_cast<size_t>(bytes_of(type_)));
  for (const int32_t token : tokens)
    if (!append_token(encoded, type_, token))
      fail(ErrorCode::format, "token " + std::to_string(token) + " does not fit the dataset's type " +
                                  std::string(name_of(type_)));
  const auto count = static_cast<int32_t>(sequence_lengths.size());
  add_encoded(std::as_bytes(std::span(encoded.data(), encoded.size())), sequence_lengths,
              std::span(&count, 1));
}

void IndexedWriter::add_encoded(std::span<const std::byte> tokens, std::span<const int32_t> sequence_lengths,
                                std::span<const int32_t> sequences_per_document) {
  int64_t sum = 0, sequences = 0;
  for (const int32_t length : sequence_lengths) sum += length;
  CAPSTAN_ASSERT(sum * bytes_of(type_) == static_cast<int64_t>(tokens.size()),
                 "sequence lengths and tokens disagree");
  bin_->write(tokens);
  lengths_->write(std::as_bytes(sequence_lengths));
  for (const int32_t count : sequences_per_document) {
    sequences += count;
    put(*boundaries_, sequences_ + sequences);
  }
  CAPSTAN_ASSERT(sequences == static_cast<int64_t>(sequence_lengths.size()),
                 "documents and sequences disagree");
  sequences_ += sequences;
  documents_ += static_cast<int64_t>(sequences_per_document.size());
  tokens_ += sum;
}

void IndexedWriter::write_index() {
  FileWriter index(prefix_ + ".idx" + suffix_);
  index.write(std::string_view(kIndexMagic, sizeof kIndexMagic));
  put(index, uint64_t{1});
  put(index, static_cast<uint8_t>(type_));
  put(index, static_cast<uint64_t>(sequences_));
  put(index, static_cast<uint64_t>(documents_ + 1));

  constexpr int64_t kChunk = 1 << 16;
  std::vector<int32_t> lengths(static_cast<size_t>(std::min(kChunk, sequences_)));
  const RandomFile spool(prefix_ + ".lengths" + suffix_);
  int64_t pointer = 0;
  // The first pass writes the lengths, the second the pointers, which follow from them.
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t begin = 0; begin < sequences_; begin += kChunk) {
      const auto chunk = std::span(lengths).first(static_cast<size_t>(std::min(kChunk, sequences_ - begin)));
      spool.read(4 * begin, std::as_writable_bytes(chunk));
      if (pass == 0) {
        index.write(std::as_bytes(chunk));
        continue;
      }
      for (const int32_t length : chunk) {
        put(index, pointer);
        pointer += length * bytes_of(type_);
      }
    }
  const RandomFile documents(prefix_ + ".documents" + suffix_);
  std::vector<std::byte> buffer(kSpoolBuffer);
  for (int64_t at = 0; at < documents.size(); at += static_cast<int64_t>(buffer.size())) {
    const auto part = std::span(buffer).first(
        static_cast<size_t>(std::min(static_cast<int64_t>(buffer.size()), documents.size() - at)));
    documents.read(at, part);
    index.write(part);
  }
  index.finish();
}

void IndexedWriter::refuse_existing(const std::string& prefix) {
  for (const char* part : {".bin", ".idx"}) {
    std::error_code unknown;
    if (std::filesystem::exists(std::filesystem::symlink_status(prefix + part, unknown)))
      fail(ErrorCode::usage, "`" + prefix + part + "` exists already",
           "choose another output, or {overwrite}");
  }
}

void IndexedWriter::finish(bool overwrite, const std::optional<TokenizerRecord>& tokenizer,
                           std::optional<int32_t> end_of_document) {
  if (!overwrite) refuse_existing(prefix_);
  bin_->finish();
  lengths_->finish(false);
  boundaries_->finish(false);
  write_index();
  // A reader needs both files. The old index is removed first and the new one is renamed last, so that an old
  // index is never read with new tokens.
  std::error_code ignored;
  std::filesystem::remove(prefix_ + ".idx", ignored);
  std::filesystem::remove(meta_path(prefix_), ignored);
  rename_over(prefix_ + ".bin" + suffix_, prefix_ + ".bin");
  if (tokenizer)
    write_file_durably(meta_path(prefix_),
                       to_json(DatasetMeta{*tokenizer, documents_, sequences_, tokens_,
                                           end_of_document.value_or(DatasetMeta::kNone)}));
  rename_over(prefix_ + ".idx" + suffix_, prefix_ + ".idx");
  sync_directory(std::filesystem::path(prefix_).parent_path());
  ::unlink((prefix_ + ".lengths" + suffix_).c_str());
  ::unlink((prefix_ + ".documents" + suffix_).c_str());
  bin_.reset();
}

}  // namespace capstan::data

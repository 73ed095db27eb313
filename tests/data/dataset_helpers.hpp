// Helpers of the dataset tests: a temporary directory, small datasets, and the fixtures of megatron-core.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "data/indexed_dataset.hpp"
#include "data/indexed_writer.hpp"
#include "support/paths.hpp"
#include "tests/support/errors.hpp"

namespace capstan::data::testing {

using capstan::test::error_of;

class TempDirectory {
 public:
  TempDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "capstan-data-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TempDirectory() { std::filesystem::remove_all(path_); }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::string& path, std::string_view content) {
  std::ofstream(path, std::ios::binary) << content;
}

// Writes documents of one sequence each (an empty one has no sequence).
inline void write_dataset(const std::string& prefix, const std::vector<std::vector<int32_t>>& documents,
                          TokenType type = TokenType::u16) {
  IndexedWriter writer(prefix, type);
  for (const auto& document : documents) {
    const auto length = static_cast<int32_t>(document.size());
    writer.add_document(document, {&length, document.empty() ? 0u : 1u});
  }
  writer.finish();
}

// `count` documents whose tokens count up from 0 over the dataset: a token is its own position. lengths(i)
// in tokens.
template <class Lengths>
std::shared_ptr<const IndexedDataset> counting_dataset(const std::string& prefix, int64_t count,
                                                       Lengths lengths) {
  IndexedWriter writer(prefix, TokenType::i32);
  int32_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(lengths(i)));
    for (auto& token : tokens) token = next++;
    const auto length = static_cast<int32_t>(tokens.size());
    writer.add_document(tokens, {&length, 1});
  }
  writer.finish();
  return std::make_shared<IndexedDataset>(prefix);
}

inline std::string fixture(const std::string& name) {
  return std::string(capstan::test::kSourceDirectory) + "/tests/data/indexed/" + name;
}

}  // namespace capstan::data::testing

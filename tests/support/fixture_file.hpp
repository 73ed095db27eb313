// Tensors that a Python program has written for a test.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/safetensors.hpp"
#include "support/paths.hpp"

namespace capstan::test {

class FixtureFile {
 public:
  // `path`: in the source directory.
  explicit FixtureFile(const std::string& path) : file_(std::string(kSourceDirectory) + "/" + path) {}
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  template <class T>
  std::vector<T> values(const std::string& name) const {
    const auto bytes = file_.bytes(file_.at(name));
    std::vector<T> result(bytes.size() / sizeof(T));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }

 private:
  checkpoint::SafetensorsFile file_;
};

}  // namespace capstan::test

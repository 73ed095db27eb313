// Reads a fixture in safetensors form: for files of this repository only.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/json.hpp"

namespace capstan::test {

class Fixture {
 public:
  explicit Fixture(const std::string& path) {
    bytes_ = capstan::read_file(path);
    uint64_t header = 0;
    if (bytes_.size() < 8) throw std::runtime_error("no header in fixture " + path);
    std::memcpy(&header, bytes_.data(), 8);
    const auto index = capstan::json_of(std::string_view(bytes_.data() + 8, header));
    for (const auto& [name, entry] : index.items()) {
      if (name == "__metadata__") continue;
      const auto offsets = entry.at("data_offsets").get<std::vector<size_t>>();
      entries_[name] = {8 + header + offsets.at(0), offsets.at(1) - offsets.at(0),
                        entry.at("shape").get<std::vector<int64_t>>()};
    }
  }
  bool has(const std::string& name) const { return entries_.count(name) > 0; }
  template <class T>
  std::vector<T> get(const std::string& name) const {
    const Entry& entry = entries_.at(name);
    std::vector<T> values(entry.bytes / sizeof(T));
    std::memcpy(values.data(), bytes_.data() + entry.begin, entry.bytes);
    return values;
  }
  const std::vector<int64_t>& shape(const std::string& name) const { return entries_.at(name).shape; }
  std::vector<std::string> names(const std::string& prefix) const {
    std::vector<std::string> result;
    for (const auto& [name, entry] : entries_)
      if (name.rfind(prefix, 0) == 0) result.push_back(name.substr(prefix.size()));
    return result;
  }

 private:
  struct Entry {
    size_t begin = 0, bytes = 0;
    std::vector<int64_t> shape;
  };
  std::string bytes_;
  std::map<std::string, Entry> entries_;
};

}  // namespace capstan::test

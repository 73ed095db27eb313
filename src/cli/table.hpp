// A text table with aligned columns.
#pragma once

#include <string>
#include <vector>

namespace capstan::cli {

class Table {
 public:
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  // Each line ends with a line break; the last column is not padded.
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace capstan::cli

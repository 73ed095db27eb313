// The reference pages of docs/reference/, in Markdown, generated from the field tables, the rules and what
// comes with the binary.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "config/core/field.hpp"
#include "config/core/library.hpp"

namespace capstan::config {

// A page of the reference: "optimizer", and what it is about.
struct PageTitle {
  std::string name, title;
};
// Fields of a file that is no recipe, and the name of its page.
struct FilePage {
  std::string name;
  const RecordInfo* fields = nullptr;
};
// One for each section, "rules", "recipes" and each of `files`, in the order of the index.
std::vector<PageTitle> reference_titles(const Schema& schema, const std::vector<FilePage>& files);

// The page of that name; the index for "README". Empty where there is none.
std::string reference_page(const Schema& schema, const Library& library, const std::string& name,
                           const std::vector<FilePage>& files);

// File name → content: README.md (the list of pages and the fields at the top of a recipe), one page for each
// section, rules.md (rules and diagnostic codes), recipes.md (recipes and presets), one for each of `files`.
std::map<std::string, std::string> reference_pages(const Schema& schema, const Library& library,
                                                   const std::vector<FilePage>& files);

}  // namespace capstan::config

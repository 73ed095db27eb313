// A resolved recipe: all its values, or all its errors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capstan/error.hpp"

namespace capstan {

// Immutable; a copy is the same object. Any number of threads may read it.
class Config {
 public:
  // recipe:     the name of a shipped recipe ("quickstart"), or a path (with a `/`, or ending in .yaml).
  // overrides:  a later one wins: "optimizer.lr=1e-3", "dataset=mock", "peft=null", "@more.yaml" (a file),
  //             "~train.train_samples" (back to the default). See docs/overrides.md.
  // world_size: ranks, instead of the recipe's `dist.world_size`. A recipe for run_training() is resolved for
  //             the ranks that run it: launched_world().size, or the size of the program's communicator.
  //
  // Errors in the recipe and the overrides are diagnostics of the result, all of them at once. Throws Error
  // only for a recipe that cannot be read: not_found, format, io.
  static Config resolve(const std::string& recipe, const std::vector<std::string>& overrides = {},
                        std::optional<int64_t> world_size = std::nullopt);

  // Whether there are no errors. There may be warnings and notes.
  bool ok() const;
  // Errors, warnings and notes, each with its location (file:line:column, or <cli>:n for the n-th override),
  // reason and, where there is one, a remedy. Empty if there are none.
  std::string diagnostics() const;
  // The same as a JSON array of objects, with the ranges and severities of the language server protocol.
  std::string diagnostics_json() const;

  // The resolved recipe, or the part at `path`: a section ("model"), a field ("model.num_layers") or a part
  // of its value. The complete YAML is a recipe again. Both end with a newline. All three throw Error: config
  // or format with the rendered errors unless ok(), usage for a path that names nothing, with near matches.
  std::string yaml(std::string_view path = {}) const;
  std::string json(std::string_view path = {}) const;
  // A field as plain text: a string without quotes, a number, "true", "null"; a list, map or section as JSON
  // on one line.
  std::string value(std::string_view path) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Config(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace capstan

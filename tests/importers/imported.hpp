// Looks up the result of an import by key or field.
#pragma once

#include <string>

#include "importers/import.hpp"

namespace capstan::importers {

inline Imported command(const std::string& options, const std::string& launcher = "python pretrain_gpt.py") {
  return import_recipe(launcher +
                           " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
                           "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data "
                           "--tokenizer-type NullTokenizer --vocab-size 99 " +
                           options,
                       "run.sh", {});
}

inline std::string value_of(const Imported& imported, const std::string& path) {
  for (const ImportedKey& one : imported.taken)
    if (one.path == path) return one.value;
  for (const AssumedValue& one : imported.assumed)
    if (one.path == path) return one.value + " (assumed)";
  return "unset";
}

inline const OmittedKey* omitted(const Imported& imported, const std::string& key) {
  for (const OmittedKey& one : imported.omitted)
    if (one.key == key) return &one;
  return nullptr;
}

inline bool omitted_as(const Imported& imported, const std::string& key, OmissionReason why) {
  const OmittedKey* found = omitted(imported, key);
  return found && found->why == why;
}

}  // namespace capstan::importers

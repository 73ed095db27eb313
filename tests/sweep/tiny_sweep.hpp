// A sweep over a model of a few thousand parameters on generated tokens, and a directory for what is planned.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "config/resolve/resolve.hpp"
#include "sweep/definition.hpp"

namespace capstan::sweep::test {

// A directory that goes away with the object.
struct Scratch {
  std::filesystem::path path;
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "capstan-sweep-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~Scratch() { std::filesystem::remove_all(path); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

inline const std::string kTiny =
    "schema: capstan-sweep/1\nname: tiny\nbase: quickstart\n"
    "set: [dataset=mock, tokenizer=none, model.num_layers=1, model.hidden_size=32, model.ffn_hidden_size=64, "
    "model.num_attention_heads=4, model.num_query_groups=2, model.seq_length=16, model.vocab_size=256, "
    "train.train_iters=8, "
    "train.micro_batch_size=1, train.global_batch_size=2]\n";

// kTiny and the rest of a sweep file.
inline Definition tiny_definition(const std::string& rest) {
  ParsedDefinition reading = read_definition_text(kTiny + rest, "/tmp", "tiny.yaml");
  INFO(config::render(reading.diagnostics, reading.sources));
  REQUIRE(reading.ok());
  return reading.definition;
}

}  // namespace capstan::sweep::test

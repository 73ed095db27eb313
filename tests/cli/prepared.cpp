#include "prepared.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <sstream>

namespace capstan::test {

// Sentences that a tiny model can learn something from.
static std::string corpus(int documents) {
  const char* const who[] = {"the cat", "a dog", "my friend", "the old captain", "nobody"};
  const char* const does[] = {"sees", "hauls", "likes", "forgets"};
  const char* const what[] = {"the load",     "a rope",      "the quick fish",
                              "its own tail", "the morning", "a capstan"};
  std::string text;
  for (int i = 0; i < documents; ++i) {
    for (int j = 0; j < 4; ++j)
      text += std::string(who[(i + j) % 5]) + " " + does[(i * 3 + j) % 4] + " " + what[(i * 7 + j * 5) % 6] +
              ". ";
    text += "\n%\n";
  }
  return text;
}

static const char* const kRecipe = R"(
name: tiny
description: two layers, for the tests
model:
  num_layers: 2
  hidden_size: 32
  ffn_hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  seq_length: 32
  vocab_size: 320
  make_vocab_size_divisible_by: 1
  position_embedding_type: rope
  normalization: RMSNorm
  activation_func: silu
  gated_linear_unit: true
  add_bias_linear: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
mixed_precision: fp32
train: {micro_batch_size: 2, global_batch_size: 4, train_iters: 12, threads: 1}
optimizer: {preset: adamw, lr: 5e-3, min_lr: 5e-4}
scheduler: {preset: cosine, lr_warmup_fraction: 0.1}
dataset: {preset: gpt, data_path: corpus_text_document, split: "90,10,0"}
tokenizer: {preset: huggingface, tokenizer_model: tokenizer.json}
validation: {eval_interval: 6, eval_iters: 1}
checkpoint: {save_interval: 6}
logger: {log_interval: 1}
)";

Prepared::Prepared() {
  write("corpus.txt", corpus(300));
  write("heldout.txt", "the cat hauls a rope. nobody likes the morning.");
  write("tiny.yaml", kRecipe);
  REQUIRE(in({"tokenizer", "train", "corpus.txt", "--separator", "%", "--vocab-size", "320", "--output",
              "tokenizer.json"})
              .code == 0);
  const Finished made = in({"data", "prepare", "corpus.txt", "--separator", "%", "--tokenizer",
                            "tokenizer.json", "--append-eod", "--output", "corpus"});
  REQUIRE_MESSAGE(made.code == 0, made.err);
}

Finished Prepared::in(std::vector<std::string> arguments) const {
  Launch launch;
  launch.arguments = std::move(arguments);
  launch.directory = path();
  return run(launch);
}

const Prepared& prepared() {
  static const Prepared once;
  return once;
}

std::vector<Json> rows_of(const std::string& file) {
  std::vector<Json> rows;
  std::istringstream text(read_text(file));
  for (std::string line; std::getline(text, line);) rows.push_back(json_of(line));
  return rows;
}

std::vector<double> losses_of(const std::string& run) {
  std::vector<double> losses;
  for (const Json& row : rows_of(run + "/metrics.jsonl"))
    if (!row.contains("event")) losses.push_back(row["loss"].is_null() ? NAN : row["loss"].get<double>());
  return losses;
}

}  // namespace capstan::test

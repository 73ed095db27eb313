// Training text: indexed datasets (`gpt`), fine-tuning samples (`sft`) or generated tokens (`mock`). The
// sequence length is model.seq_length.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

enum class DatasetKind : uint8_t { gpt, mock, sft };
enum class SampleFormat : uint8_t { automatic, messages, sharegpt, alpaca, prompt_completion, text };
enum class LossMode : uint8_t { assistant, last_turn, all };
enum class TooLong : uint8_t { drop, truncate };
enum class BadLine : uint8_t { fail, skip };
enum class SampleOrder : uint8_t { capstan, megatron };

template <>
struct EnumNames<DatasetKind> {
  static constexpr EnumEntry<DatasetKind> list[] = {
      {DatasetKind::gpt, "gpt", "indexed datasets written by capstan data prepare"},
      {DatasetKind::mock, "mock", "generated tokens, no files"},
      {DatasetKind::sft, "sft", "conversations, prompts with completions, or texts, from JSONL files"},
  };
};

template <>
struct EnumNames<SampleFormat> {
  static constexpr EnumEntry<SampleFormat> list[] = {
      {SampleFormat::automatic, "auto", "detected from the keys of the first sample of each file"},
      {SampleFormat::messages, "messages", "{\"messages\": [{\"role\": …, \"content\": …}, …]}",
       "chat openai"},
      {SampleFormat::sharegpt, "sharegpt", "{\"conversations\": [{\"from\": …, \"value\": …}, …]}"},
      {SampleFormat::alpaca, "alpaca", "{\"instruction\": …, \"input\": …, \"output\": …}"},
      {SampleFormat::prompt_completion, "prompt_completion", "{\"prompt\": …, \"completion\": …}"},
      {SampleFormat::text, "text", "{\"text\": …}: loss on every token"},
  };
};

template <>
struct EnumNames<LossMode> {
  static constexpr EnumEntry<LossMode> list[] = {
      {LossMode::assistant, "assistant", "on the assistant's turns, including their end-of-turn tokens",
       "completion"},
      {LossMode::last_turn, "last_turn", "on the last turn of the assistant"},
      {LossMode::all, "all", "on every token", "full"},
  };
};

template <>
struct EnumNames<TooLong> {
  static constexpr EnumEntry<TooLong> list[] = {
      {TooLong::drop, "drop", "dropped; the log counts them"},
      {TooLong::truncate, "truncate", "truncated to model.seq_length; the log counts them"},
  };
};

template <>
struct EnumNames<BadLine> {
  static constexpr EnumEntry<BadLine> list[] = {
      {BadLine::fail, "fail", "the run ends with an error before training"},
      {BadLine::skip, "skip", "skipped; the log counts them and lists the first"},
  };
};

template <>
struct EnumNames<SampleOrder> {
  static constexpr EnumEntry<SampleOrder> list[] = {
      {SampleOrder::capstan, "capstan",
       "each epoch is shuffled separately; the order does not depend on the length of the run"},
      {SampleOrder::megatron, "megatron",
       "the order of Megatron-LM, sample for sample; it depends on the length of the run"},
  };
};

// Dataset prefix (the path without .bin/.idx) and its weight, in the order written.
using Blend = std::vector<std::pair<std::string, double>>;

struct DatasetConfig {
  DatasetKind kind = DatasetKind::gpt;
  // gpt: exactly one of data_path, blend, or the three blends per split.
  std::vector<Path> data_path;
  Blend blend;
  Blend train_blend, valid_blend, test_blend;
  std::optional<std::string> split;
  SampleOrder sample_order = SampleOrder::capstan;
  std::optional<Path> path_to_cache;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool eod_mask_loss = false;
  // sft: samples of model.seq_length tokens at most, packed several to a row
  std::vector<Path> train_files;
  std::vector<Path> valid_files, test_files;
  SampleFormat format = SampleFormat::automatic;
  LossMode loss_mode = LossMode::assistant;
  bool packing = true;
  TooLong too_long = TooLong::truncate;
  BadLine on_bad_line = BadLine::fail;
  std::optional<int64_t> max_train_samples;
  // all kinds
  int64_t random_seed = 1234;
  int64_t num_workers = 2;
};

}  // namespace capstan::config

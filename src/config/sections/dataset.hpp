// Training text: indexed datasets (`gpt`), fine-tuning samples (`sft`) or generated tokens (`mock`). The sequence length is
// model.seq_length.
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
      {SampleFormat::automatic, "auto", "by the keys of each file's first sample"},
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
      {LossMode::assistant, "assistant", "on what the assistant says, its end of turn included",
       "completion"},
      {LossMode::last_turn, "last_turn", "on the assistant's last turn"},
      {LossMode::all, "all", "on every token", "full"},
  };
};

template <>
struct EnumNames<TooLong> {
  static constexpr EnumEntry<TooLong> list[] = {
      {TooLong::drop, "drop", "left out, and counted"},
      {TooLong::truncate, "truncate", "cut at model.seq_length, and counted"},
  };
};

template <>
struct EnumNames<BadLine> {
  static constexpr EnumEntry<BadLine> list[] = {
      {BadLine::fail, "fail", "the run does not begin"},
      {BadLine::skip, "skip", "left out; counted, and the first are named in the log"},
  };
};

template <>
struct EnumNames<SampleOrder> {
  static constexpr EnumEntry<SampleOrder> list[] = {
      {SampleOrder::capstan, "capstan",
       "each pass has an order of its own; a longer run begins with the shorter one"},
      {SampleOrder::megatron, "megatron",
       "Megatron-LM's, sample for sample; it depends on the length of the run"},
  };
};

// Dataset prefix (the path without .bin/.idx) and its weight, in the order written.
using Blend = std::vector<std::pair<std::string, double>>;

struct DatasetConfig {
  DatasetKind kind = DatasetKind::gpt;
  // gpt: exactly one of data_path, blend, or the three blends per split.
  std::vector<Path> data_path;  // prefixes, weighted by their number of samples
  Blend blend;
  Blend train_blend, valid_blend, test_blend;
  std::optional<std::string> split;  // "969,30,1": shares of train, validation, test
  SampleOrder sample_order = SampleOrder::capstan;
  std::optional<Path> path_to_cache;  // directory that keeps built indices; null: built again by each start
  bool reset_position_ids = false;    // positions start at 0 after each end of document
  bool reset_attention_mask = false;  // attention does not cross documents
  bool eod_mask_loss = false;         // no loss on end-of-document tokens
  // sft: samples of model.seq_length tokens at most, packed several to a row
  std::vector<Path> train_files;              // JSONL
  std::vector<Path> valid_files, test_files;  // instead of `split`
  SampleFormat format = SampleFormat::automatic;
  LossMode loss_mode = LossMode::assistant;
  bool packing = true;  // documents do not see each other, positions start again
  TooLong too_long = TooLong::truncate;
  BadLine on_bad_line = BadLine::fail;
  std::optional<int64_t> max_train_samples;  // null: all
  // all kinds
  int64_t random_seed = 1234;
  int64_t num_workers = 2;  // threads that read ahead; 0: read in the step
};

}  // namespace capstan::config

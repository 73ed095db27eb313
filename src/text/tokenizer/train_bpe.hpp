// Learns a byte-level BPE vocabulary, as Hugging Face's BpeTrainer does: the same documents and options give
// the same tokenizer.json, byte for byte, whatever the number of threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "base/thread_pool.hpp"
#include "text/tokenizer/pre_tokenizer_choice.hpp"

namespace capstan::text {

struct TrainOptions {
  int64_t vocab_size = 0;  // entries in all: the special tokens, 256 bytes, the merges
  // A pair that is rarer is not merged; the vocabulary may stay smaller for it.
  int64_t min_frequency = 2;
  PreTokenizerChoice pre_tokenizer = PreTokenizerChoice::gpt2;
  bool add_prefix_space = false;
  std::vector<std::string> special_tokens = {"<|endoftext|>"};  // the first ids, in this order
};

// phase: "reading" (bytes; total 0 when unknown), "counting" (words), "merging" (entries of the vocabulary).
struct TrainProgress {
  std::string_view phase;
  int64_t done, total;
};
using TrainProgressSink = std::function<void(const TrainProgress&)>;

// Gives the next document, false at the end. Called by one thread at a time.
using DocumentSource = FunctionRef<bool(std::string& document)>;

// Returns the text of a tokenizer.json. Throws ErrorCode::usage for options that cannot be.
std::string train_bpe(DocumentSource documents, const TrainOptions& options, ThreadPool& pool,
                      const TrainProgressSink& progress = {});

// Plain text files, each read as one text. (It is split for the threads only where no piece of text could
// cross.)
std::string train_bpe(std::span<const std::filesystem::path> files, const TrainOptions& options,
                      ThreadPool& pool, const TrainProgressSink& progress = {});

}  // namespace capstan::text

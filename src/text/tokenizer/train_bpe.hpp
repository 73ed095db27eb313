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
  // Number of entries: special tokens, 256 bytes and merges.
  int64_t vocab_size = 0;
  // Rarer pairs are not merged, so the vocabulary may be smaller than vocab_size.
  int64_t min_frequency = 2;
  PreTokenizerChoice pre_tokenizer = PreTokenizerChoice::gpt2;
  bool add_prefix_space = false;
  // The special tokens, which have the first ids in this order.
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
};

// Progress of a phase: "reading" (in bytes; total is 0 if unknown), "counting" (in words) or "merging" (in
// entries of the vocabulary).
struct TrainProgress {
  std::string_view phase;
  int64_t done, total;
};
using TrainProgressSink = std::function<void(const TrainProgress&)>;

// Sets `document` to the next document, or returns false at the end. Called by one thread at a time.
using DocumentSource = FunctionRef<bool(std::string& document)>;

// Returns the text of a tokenizer.json. Throws ErrorCode::usage for invalid options.
std::string train_bpe(DocumentSource documents, const TrainOptions& options, ThreadPool& pool,
                      const TrainProgressSink& progress = {});

// Trains on plain text files, each read as one document. (The threads split a file only at boundaries that no
// piece of text can cross.)
std::string train_bpe(std::span<const std::filesystem::path> files, const TrainOptions& options,
                      ThreadPool& pool, const TrainProgressSink& progress = {});

}  // namespace capstan::text

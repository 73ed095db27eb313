// Conversion between Capstan's checkpoints and the files of other programs. Streams tensor by tensor into a
// temporary directory next to the target, syncs and renames it; refuses a target that exists.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "config/sections/model.hpp"
#include "formats/external_model.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::formats {

// Tokenizer and auxiliary files: name and content.
using Assets = std::vector<std::pair<std::string, std::string>>;

// The input of an export: parameters under Capstan's names, their model, and the auxiliary files.
struct ExportSource {
  checkpoint::TensorSource* parameters = nullptr;
  // The model section, including derived values.
  config::ModelConfig model;
  Assets assets;
};

struct WriteResult {
  // Number of tensors, and their size in bytes.
  int64_t tensors = 0, bytes = 0;
  std::vector<std::string> files;
  // Architecture and format, such as "llama in safetensors".
  std::string kind;
  // False if the model was exported without a tokenizer.
  bool tokenizer = true;
  // What to know about the result, such as weights that were left out; may be empty.
  std::string note;
};

// Converts a model, with its layers of multi-token prediction, to a checkpoint. All tensors are converted to
// `dtype`; nullopt keeps their types.
WriteResult write_checkpoint(ExternalModel& from, const std::filesystem::path& to,
                             std::optional<DType> dtype);

// The run id of imported checkpoints.
inline constexpr std::string_view kImportedRun = "imported";
// A checkpoint of step 0 that was not written by a run.
struct FirstCheckpoint {
  const config::Resolution* resolution = nullptr;
  checkpoint::TensorSource* tensors = nullptr;
  // Type of all tensors; nullopt: unchanged.
  std::optional<DType> dtype;
  Assets assets;
  // Content hash of the base weights of these adapters; empty: a full model.
  std::string base;
};
WriteResult write_first_checkpoint(FirstCheckpoint from, const std::filesystem::path& to);
// The text of state.json in such a checkpoint.
std::string first_state(const std::string& base);

// The module names of the model's Transformers class: the class of a config.json in `assets`, else of the
// family that write_hf() chooses.
TensorNames class_names(const config::ModelConfig& model, const Assets& assets);

struct HfOptions {
  std::optional<DType> dtype;
  // Largest file size; nullopt: as in the index that came with the weights, else 5 GB.
  std::optional<int64_t> shard_bytes;
};
// Reuses the config.json and index that came with the weights where they still apply. ErrorCode::usage where
// `to` exists; ::unsupported, with the differing fields, for a model that no family supports.
WriteResult write_hf(const ExportSource& from, const std::filesystem::path& to,
                     const HfOptions& options = {});

enum class GgufType : uint8_t { f32, f16, bf16, q8_0 };
// Writes one file. ErrorCode::usage where it exists; ::unsupported for a model or tokenizer that no GGUF
// architecture supports, with the differing fields, and for values that the type cannot represent, with the
// tensor.
WriteResult write_gguf(const ExportSource& from, const std::filesystem::path& to, GgufType type);

}  // namespace capstan::formats

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
struct Exported {
  checkpoint::TensorSource* parameters = nullptr;
  config::ModelConfig model;  // with its derived values
  Assets assets;
};

struct Written {
  int64_t tensors = 0, bytes = 0;  // of tensors
  std::vector<std::string> files;
  std::string kind;       // "llama in safetensors"
  bool tokenizer = true;  // false: exported without a tokenizer
};

// dtype: of all tensors; null: unchanged.
Written write_checkpoint(ExternalModel& from, const std::filesystem::path& to, std::optional<DType> dtype);

// The run id of imported checkpoints.
inline constexpr std::string_view kImportedRun = "imported";
// A checkpoint of step 0 that was not written by a run.
struct FirstCheckpoint {
  const config::Resolution* resolution = nullptr;
  checkpoint::TensorSource* tensors = nullptr;
  std::optional<DType> dtype;  // of all tensors; null: unchanged
  Assets assets;
  // Content hash of the base weights of these adapters; empty: a full model.
  std::string base;
};
Written write_first_checkpoint(FirstCheckpoint from, const std::filesystem::path& to);
// Its state.json.
std::string first_state(const std::string& base);

// The module names of the Transformers class for the model: of a config.json in `assets`, else of the family
// that write_hf() chooses.
TensorNames class_names(const config::ModelConfig& model, const Assets& assets);

struct HfOptions {
  std::optional<DType> dtype;
  // Largest file size; nullopt: as in the index that came with the weights, else 5 GB.
  std::optional<int64_t> shard_bytes;
};
// Reuses the config.json and index that came with the weights where they still apply. ErrorCode::usage where
// `to` exists; ::unsupported, with the differing fields, for a model that no family supports.
Written write_hf(const Exported& from, const std::filesystem::path& to, const HfOptions& options = {});

// Writes one file. ErrorCode::usage where it exists; ::unsupported for a model or tokenizer that no GGUF
// architecture supports, with the differing fields, and for values that the type cannot represent, with the
// tensor.
enum class GgufType : uint8_t { f32, f16, bf16, q8_0 };
Written write_gguf(const Exported& from, const std::filesystem::path& to, GgufType type);

}  // namespace capstan::formats

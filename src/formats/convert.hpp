// Between Capstan's checkpoints and the files of other programs. Everything is streamed tensor by tensor into a temporary place
// beside the target, synced and renamed; a target that exists is refused.
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

namespace capstan::interchange {

// Small files beside the weights: name and content.
using Assets = std::vector<std::pair<std::string, std::string>>;

// What is written: parameters under Capstan's names, the model that they are of, and the small files beside them.
struct Exported {
  checkpoint::TensorSource* parameters = nullptr;
  config::ModelConfig model;  // with its derived values
  Assets assets;
};

struct Written {
  int64_t tensors = 0, bytes = 0;  // of tensors
  std::vector<std::string> files;
  std::string kind;       // "llama in safetensors"
  bool tokenizer = true;  // false: a model for another program that lies there without a tokenizer
};

// dtype: of all tensors; null: as they are.
Written write_checkpoint(ExternalModel& from, const std::filesystem::path& to, std::optional<DType> dtype);

// Instead of a run's id in a checkpoint that no run has written.
inline constexpr std::string_view kImportedRun = "imported";
// A checkpoint of step 0 that no run has written.
struct FirstCheckpoint {
  const config::Resolution* resolution = nullptr;
  checkpoint::TensorSource* tensors = nullptr;
  std::optional<DType> dtype;  // of all tensors; null: as they are
  Assets assets;
  std::string base;  // hash of the weights that the tensors are adapters of; empty: a whole model
};
Written write_first_checkpoint(FirstCheckpoint from, const std::filesystem::path& to);
// Its state.json.
std::string first_state(const std::string& base);

// How the class of Transformers that computes the model names its modules: that of a config.json among `carried`, else of the
// family that write_hf() would choose.
TensorNames class_names(const config::ModelConfig& model, const Assets& assets);

struct HfOptions {
  std::optional<DType> dtype;
  std::optional<int64_t>
      shard_bytes;  // of a file at most; none: as the index that came along says, else 5 GB
};
// config.json and the index are those that came with the weights where they still say the same. ErrorCode::usage where `to`
// exists; ::unsupported for a model that no family computes, with what differs.
Written write_hf(const Exported& from, const std::filesystem::path& to, const HfOptions& options = {});

// Writes one file. ErrorCode::usage where it exists; ::unsupported for a model or a tokenizer that no architecture there computes,
// with what differs, and for numbers that the type cannot hold, with the tensor.
enum class GgufType : uint8_t { f32, f16, bf16, q8_0 };
Written write_gguf(const Exported& from, const std::filesystem::path& to, GgufType type);

}  // namespace capstan::interchange

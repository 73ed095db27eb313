// The manifest of a checkpoint: its files with hashes, and the file of every region of every tensor. The JSON
// text ends with a hash of itself, which detects any flipped bit.
//
//   {"schema": "capstan.checkpoint/1", "step": 100, "consumed_samples": …, "consumed_tokens": …, "run_id": …,
//    "recipe_hash": …, "layout": …, "version": …, "parent": …, "world": 2, "block_bytes": 4194304,
//    "files": {"rank-00000.safetensors": {"bytes": …, "xxh3_128": "…", "block_xxh3_64": ["…", …]}, …},
//    "tensors": {"decoder.w": {"dtype": "fp32", "shape": [4,8], "pieces": [
//        {"file": "rank-00000.safetensors", "key": "decoder.w[0:2,0:8]", "offsets": [0,0], "sizes": [2,8]},
//        …]}, …},
//    "manifest_hash": "<xxh3-128 of all bytes before this key's line>"}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/hash.hpp"
#include "checkpoint/tensor_source.hpp"
#include "tensor/dtype.hpp"
#include "tensor/region.hpp"

namespace capstan::checkpoint {

inline constexpr std::string_view kSchema = "capstan.checkpoint/1";
inline constexpr std::string_view kManifestFile = "manifest.json";
// The trainer's scalar state.
inline constexpr std::string_view kStateFile = "state.json";
// The resolved recipe.
inline constexpr std::string_view kRecipeFile = "recipe.yaml";

// The trainer's description of a save, the same on every rank.
struct SaveInfo {
  int64_t step = 0;
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  // Id of the run that wrote the checkpoint.
  std::string run_id;
  // Hash of the resolved recipe.
  std::string recipe_hash;
  // "tp1 pp1 dp2", for display.
  std::string layout;
  // Version of Capstan.
  std::string version;
  // Checkpoint that the run continued from; empty: none.
  std::string parent;
};

// A region of a tensor in a file of the checkpoint.
struct Chunk {
  // The safetensors file, and the tensor's name in it.
  std::string file, key;
  // The region of the global tensor.
  Region where;
};

struct StoredTensor : TensorInfo {
  // The chunks of the tensor, which cover every element exactly once.
  std::vector<Chunk> chunks;
};

struct Manifest {
  SaveInfo info;
  // Number of ranks that wrote the checkpoint.
  int64_t world = 1;
  int64_t block_bytes = kBlockBytes;
  std::map<std::string, FileHash> files;
  std::map<std::string, StoredTensor> tensors;
};

// True for [A-Za-z0-9._-]+ without a leading dot. Checkpoints use and read no other file names.
bool is_plain_file_name(std::string_view name);

std::string manifest_text(const Manifest& manifest);

// Checks the self-hash, the syntax and the contents (file names plain and listed, regions that cover each
// tensor exactly, block counts). Throws ErrorCode::format naming `file` and the JSON path;
// ErrorCode::unsupported for a later schema version.
Manifest parse_manifest(std::string_view text, const std::string& file);

// Appends the self-hash to a body without one. Public for tests and fuzzing.
std::string append_manifest_hash(std::string body);

// One rank's entries of the manifest, as text that the trainer sends to rank 0. parse_rank_manifest()
// checks like parse_manifest().
struct RankManifest {
  int64_t step = 0;
  int64_t rank = 0;
  int64_t world = 1;
  std::map<std::string, FileHash> files;
  // Chunks of this rank only.
  std::map<std::string, StoredTensor> tensors;
};
std::string rank_manifest_text(const RankManifest& part);
RankManifest parse_rank_manifest(std::string_view text, const std::string& file);

}  // namespace capstan::checkpoint

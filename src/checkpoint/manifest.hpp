// The manifest of a checkpoint: which files there are, with hashes, and which rectangle of which tensor lies
// where. JSON that ends with a hash of itself, so that a flipped bit anywhere is noticed.
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
inline constexpr std::string_view kStateFile = "state.json";    // small scalars of the trainer
inline constexpr std::string_view kRecipeFile = "recipe.yaml";  // the resolved recipe

// What the trainer says about a save; the same on every rank.
struct SaveInfo {
  int64_t step = 0;
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  std::string run_id;       // which run wrote it
  std::string recipe_hash;  // of the resolved recipe
  std::string layout;       // for people: "tp1 pp1 dp2"
  std::string version;      // of the program
  std::string parent;       // checkpoint that the run continued from; empty: none
};

struct Chunk {
  std::string file, key;  // the shard and the tensor's name in it
  Region where;
};

struct StoredTensor : TensorInfo {
  std::vector<Chunk> chunks;  // cover every cell exactly once
};

struct Manifest {
  SaveInfo info;
  int64_t world = 1;  // ranks that wrote it
  int64_t block_bytes = kBlockBytes;
  std::map<std::string, FileHash> files;
  std::map<std::string, StoredTensor> tensors;
};

// [A-Za-z0-9._-]+ without a leading dot: the only names of files that are written or followed.
bool is_plain_file_name(std::string_view name);

std::string manifest_text(const Manifest& manifest);

// Checks the self-hash, the form and the meaning (file names plain and listed, pieces inside and exactly
// covering, block counts). Throws ErrorCode::format naming `file` and the place; a schema of a later version
// is ErrorCode::unsupported.
Manifest parse_manifest(std::string_view text, const std::string& file);

// Appends the self-hash to a body that ends before it (tests and fuzzing make well-sealed nonsense with it).
std::string seal_manifest(std::string body);

// One rank's part, as text that the trainer may send to rank 0. `from_text` checks like parse_manifest.
struct RankManifest {
  int64_t step = 0;
  int64_t rank = 0;
  int64_t world = 1;
  std::map<std::string, FileHash> files;
  std::map<std::string, StoredTensor> tensors;  // pieces of this rank only
};
std::string rank_manifest_text(const RankManifest& part);
RankManifest parse_rank_manifest(std::string_view text, const std::string& file);

}  // namespace capstan::checkpoint

// A directory of checkpoints: listing, verification, search for the newest valid checkpoint, and retention.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/file_system.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/reader.hpp"

namespace capstan::checkpoint {

struct Checkpoint {
  std::filesystem::path path;
  int64_t step = 0;
};

// The directories ROOT/step-NNNNNNNN, newest first, without opening them. Empty where `root` does not exist.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& root);

struct Problem {
  // The file of the checkpoint; empty for a problem of the checkpoint itself.
  std::string file;
  // Number of the block, from 0, whose hash differs.
  std::optional<int64_t> block;
  // A sentence with file and byte range.
  std::string text;
};

// Verifies a checkpoint and returns all problems. With parts > 1 it hashes only the files with index % parts
// == part, so that ranks can divide the reading; it always checks the structure.
std::vector<Problem> verify(const std::filesystem::path& directory, Verification verification, int part = 0,
                            int parts = 1);

struct SearchResult {
  struct Refused {
    Checkpoint checkpoint;
    std::string reason;
  };
  std::optional<Checkpoint> found;
  // Newer checkpoints that were refused, newest first.
  std::vector<Refused> refused;
};

// Finds the newest valid checkpoint, and the reasons why newer ones were refused. With run_id,
// refuses checkpoints of other runs.
SearchResult find_latest(const std::filesystem::path& root, Verification verification,
                         const std::optional<std::string>& run_id = {});

// Finds and fully verifies the checkpoint at a path that a user gave: a checkpoint directory, a directory of
// checkpoints, or a run directory (its `checkpoints`). Throws ErrorCode::not_found (no checkpoint) or
// ::format (none verifies), with the reasons. Appends to `refused` a line for each newer checkpoint that does
// not verify.
Checkpoint resolve_checkpoint(const std::filesystem::path& path, std::vector<std::string>* refused = nullptr);

// A hint for a path without a checkpoint: hf:DIR, gguf:FILE …
std::string no_checkpoint_help(const std::filesystem::path& path);

struct Retention {
  // Number of newest intact checkpoints to keep; negative: all.
  int64_t most_recent = 2;
  // Keep all steps that are multiples of this.
  std::optional<int64_t> keep_multiples;
  // A step whose content needs no verification.
  std::optional<int64_t> just_written;
};

// Deletes old checkpoints (renamed to .trash-… first). Keeps the newest one that verifies, the last one, and
// those with a broken structure (for diagnosis). Returns the deleted steps.
std::vector<int64_t> apply_retention(FileSystem& files, const std::filesystem::path& root,
                                     const Retention& retention);

// Removes .tmp-step-… and .trash-… of earlier processes. Only the holder of the run's lock may call it, and
// not during a save.
void remove_leftovers(FileSystem& files, const std::filesystem::path& root);

}  // namespace capstan::checkpoint

// A directory of checkpoints: what is there, what of it can be trusted, what may go.
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

// The directories ROOT/step-NNNNNNNN, newest first; nothing is opened. A root that does not exist has none.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& root);

struct Problem {
  std::string file;              // within the checkpoint; empty: the checkpoint as a whole
  std::optional<int64_t> block;  // of the file, from 0, where a hash differs
  std::string text;              // a whole sentence with file and byte range
};

// Everything that is wrong with a checkpoint; empty: it verifies. With parts > 1 only the files whose turn it
// is are hashed (index % parts == part), so that ranks can share the reading; the structure is checked by
// all.
std::vector<Problem> verify(const std::filesystem::path& directory, Depth depth, int part = 0, int parts = 1);

struct Search {
  struct Refused {
    Checkpoint checkpoint;
    std::string reason;
  };
  std::optional<Checkpoint> found;
  std::vector<Refused> refused;  // newer ones, newest first
};

// The newest checkpoint that verifies, and why newer ones do not. With run_id, those of other runs are
// refused too.
Search find_latest(const std::filesystem::path& root, Depth depth,
                   const std::optional<std::string>& run_id = {});

// What a user may name: a checkpoint directory, a directory of checkpoints, or a run directory (its
// `checkpoints`). Returns the checkpoint, fully verified. Throws ErrorCode::not_found (none there) or
// ::format (none verifies), with the reasons.
// `refused` gets a line for each newer checkpoint that does not verify.
Checkpoint resolve_checkpoint(const std::filesystem::path& path, std::vector<std::string>* refused = nullptr);

// What to write in place of a name that holds no checkpoint: hf:DIR, gguf:FILE …
std::string no_checkpoint_help(const std::filesystem::path& path);

struct Retention {
  int64_t most_recent = 2;                // newest kept, those with a sound structure counted; negative: all
  std::optional<int64_t> keep_multiples;  // steps that are multiples of this are always kept
  std::optional<int64_t> just_written;    // a step whose content is known to be good: spares reading it back
};

// Deletes old checkpoints (renamed to .trash-… first). Never the newest one that verifies, never one whose
// structure is broken (it is evidence), never the last. Returns the steps deleted.
std::vector<int64_t> apply_retention(FileSystem& files, const std::filesystem::path& root,
                                     const Retention& retention);

// Removes .tmp-step-… and .trash-… of earlier processes. Only the holder of the run's lock may call it, with
// no save in flight.
void remove_leftovers(FileSystem& files, const std::filesystem::path& root);

}  // namespace capstan::checkpoint

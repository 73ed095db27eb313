// Writing one checkpoint, by one process or by many ranks:
//
//   every rank:  Writer w(files, root, info, attempt, rank, world);  w.add(…) …;  part = w.finish_rank();
//   trainer:     gathers the parts on rank 0
//   rank 0:      w.add_text(kStateFile, …) before finish_rank;  w.commit(parts);
//
// Until commit() the files lie in ROOT/.tmp-step-NNNNNNNN-ATTEMPT/, which no reader looks at. commit() writes
// the manifest last, syncs, and renames the directory to ROOT/step-NNNNNNNN/ (in one exchange where one is
// there already).
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/file_system.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"
#include "tensor/region.hpp"

namespace capstan::checkpoint {

class Writer {
 public:
  // attempt: [A-Za-z0-9-]+, the same on all ranks and never used before under this root (run id and a counter
  // will do). Writes nothing yet. No method is safe to call from two threads at once; any thread may call
  // them.
  Writer(FileSystem& files, std::filesystem::path root, SaveInfo info, const std::string& attempt, int rank,
         int world);

  // A rectangle of the tensor `name` of shape `shape`, whose bytes are row-major. They must stay valid until
  // finish_rank() has returned. Every element of a tensor is added by exactly one rank.
  void add(const std::string& name, DType dtype, const Shape& shape, const Region& where,
           std::span<const std::byte> bytes);
  // The bytes when their turn comes.
  void add(const std::string& name, DType dtype, const Shape& shape, const Region& where, ByteSource source);
  // A file beside the shards; its name is plain and differs from those of other ranks.
  void add_text(std::string_view file_name, std::string content);
  void add_copy(std::string_view file_name, const std::filesystem::path& from);  // read now, 1 GiB at most

  // Writes and syncs this rank's files. Returns what rank 0 needs to know (a RankManifest as text).
  std::string finish_rank();

  // Rank 0, after all ranks' finish_rank: checks that the parts are complete (each rank once, every cell of
  // every tensor exactly once, all files there), writes the manifest and makes the checkpoint appear. Returns
  // its directory. On an error nothing has appeared and what was there is unchanged.
  std::filesystem::path commit(const std::vector<std::string>& parts);

  // Removes the temporary directory of a failed save, to free its space; errors are swallowed (the disk may
  // be broken).
  void abandon() noexcept;

  const std::filesystem::path& temporary_directory() const { return temporary_; }

 private:
  FileSystem& files_;
  std::filesystem::path root_, temporary_;
  SaveInfo info_;
  int rank_, world_;
  std::vector<SafetensorsTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> texts_;
  RankManifest part_;
  bool swapped_ = false;  // temporary_ holds the checkpoint that this one replaced
};

std::string step_directory_name(int64_t step);  // "step-00000100"

}  // namespace capstan::checkpoint

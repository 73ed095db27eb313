// Writes one checkpoint, from one process or many ranks:
//
//   every rank:  Writer w(files, root, info, attempt, rank, world);  w.add(…) …;  manifest = w.finish_rank();
//   trainer:     gathers the rank manifests on rank 0
//   rank 0:      w.add_text(kStateFile, …) before finish_rank;  w.commit(rank_manifests);
// Until commit() the files are in ROOT/.tmp-step-NNNNNNNN-ATTEMPT/, which readers ignore. commit() writes the
// manifest last, syncs, and renames the directory to ROOT/step-NNNNNNNN/ (atomically exchanged with an
// existing one).
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
  // attempt: [A-Za-z0-9-]+, the same on all ranks and unique under this root (for example run id and a
  // counter). Writes nothing yet. Methods may be called from any thread, but not concurrently.
  Writer(FileSystem& files, std::filesystem::path root, SaveInfo info, const std::string& attempt, int rank,
         int world);

  // Adds a region of the tensor `name` with the global shape `shape`. `bytes` are row-major and must stay
  // valid until finish_rank() returns. Every element of a tensor is added by exactly one rank.
  void add(const std::string& name, DType dtype, const Shape& shape, const Region& where,
           std::span<const std::byte> bytes);
  // The same with bytes that are produced when they are written.
  void add(const std::string& name, DType dtype, const Shape& shape, const Region& where, ByteSource source);
  // Adds a file other than the shards. Its name is plain and differs from those of other ranks.
  void add_text(std::string_view file_name, std::string content);
  // Adds a copy of a file of at most 1 GiB, which is read immediately.
  void add_copy(std::string_view file_name, const std::filesystem::path& from);

  // Writes and syncs this rank's files. Returns a RankManifest as text, for rank 0.
  std::string finish_rank();

  // On rank 0, after finish_rank on all ranks: checks that the manifests are complete (each rank once, every
  // element of every tensor exactly once, all files present), writes the manifest and publishes the
  // checkpoint. Returns its directory. After an error the directory of checkpoints is unchanged.
  std::filesystem::path commit(const std::vector<std::string>& rank_manifests);

  // Removes the temporary directory of a failed save, to free its space. Ignores errors.
  void abandon() noexcept;

  const std::filesystem::path& temporary_directory() const { return temporary_; }

 private:
  FileSystem& files_;
  std::filesystem::path root_, temporary_;
  SaveInfo info_;
  int rank_, world_;
  std::vector<SafetensorsTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> texts_;
  RankManifest rank_manifest_;
  // True once the directories were exchanged: temporary_ then holds the replaced checkpoint.
  bool swapped_ = false;
};

// The directory name of a step, such as "step-00000100".
std::string step_directory_name(int64_t step);

}  // namespace capstan::checkpoint

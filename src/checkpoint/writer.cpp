#include "checkpoint/writer.hpp"

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

namespace fs = std::filesystem;

static std::string zero_padded(int64_t value, size_t digits) {
  std::string text = std::to_string(value);
  return std::string(text.size() < digits ? digits - text.size() : 0, '0') + text;
}

std::string step_directory_name(int64_t step) {
  return "step-" + zero_padded(step, 8);
}

Writer::Writer(FileSystem& files, fs::path root, SaveInfo info, const std::string& attempt, int rank,
               int world)
    : files_(files), root_(std::move(root)), info_(std::move(info)), rank_(rank), world_(world) {
  CAPSTAN_ASSERT(is_plain_file_name(attempt) && attempt.find('.') == std::string::npos,
                 "name of the attempt");
  CAPSTAN_ASSERT(info_.step >= 0 && rank >= 0 && rank < world, "step and rank of a save");
  temporary_ = root_ / (".tmp-" + step_directory_name(info_.step) + "-" + attempt);
  rank_manifest_.step = info_.step;
  rank_manifest_.rank = rank;
  rank_manifest_.world = world;
}

void Writer::add(const std::string& name, DType dtype, const Shape& shape, const Region& where,
                 std::span<const std::byte> bytes) {
  add(name, dtype, shape, where, source_of(bytes));
}

void Writer::add(const std::string& name, DType dtype, const Shape& shape, const Region& where,
                 ByteSource source) {
  CAPSTAN_ASSERT(fits(where, shape),
                 "tensor " + in_quotes(name) + ": a region outside of shape " + shape.text());
  StoredTensor& tensor = rank_manifest_.tensors[name];
  if (tensor.chunks.empty()) {
    tensor.dtype = dtype;
    tensor.shape = shape;
  }
  CAPSTAN_ASSERT(tensor.dtype == dtype && tensor.shape == shape,
                 "tensor " + in_quotes(name) + " with two shapes or types");
  // A full tensor keeps its name, so that the file of a single rank reads like any safetensors file.
  const std::string key = where == full_region(shape) ? name : name + where.text();
  const std::string file = "rank-" + zero_padded(rank_, 5) + ".safetensors";
  tensor.chunks.push_back({file, key, where});
  tensors_.push_back({key, dtype, where.sizes, std::move(source)});
}

void Writer::add_text(std::string_view file_name, std::string content) {
  CAPSTAN_ASSERT(
      is_plain_file_name(file_name) && file_name != kManifestFile && !file_name.starts_with("rank-"),
      "name of a file of a checkpoint");
  texts_.emplace_back(file_name, std::move(content));
}

void Writer::add_copy(std::string_view file_name, const fs::path& from) {
  add_text(file_name, read_file(from, uint64_t{1} << 30));
}

std::string Writer::finish_rank() {
  files_.make_directories(temporary_);
  if (!tensors_.empty() || rank_ == 0) {
    const std::string name = "rank-" + zero_padded(rank_, 5) + ".safetensors";
    rank_manifest_.files[name] = write_safetensors(files_, temporary_ / name, tensors_, {{"format", "pt"}});
  }
  for (const auto& [name, content] : texts_) {
    Hasher hasher;
    hasher.update(std::as_bytes(std::span(content.data(), content.size())));
    const auto file = files_.create(temporary_ / name);
    file->write_text(content);
    file->finish();
    CAPSTAN_ASSERT(rank_manifest_.files.emplace(name, hasher.finish()).second,
                   "file " + in_quotes(name) + " twice in a checkpoint");
  }
  // Sync the directory entries of this rank's files here too, because rank 0 may be on another machine.
  files_.sync_directory(temporary_);
  tensors_.clear();
  texts_.clear();
  return rank_manifest_text(rank_manifest_);
}

// Merges the manifests of all ranks. Each rank must occur once, and every element of every tensor must be
// covered once.
static Manifest join_manifests(const SaveInfo& info, int world,
                               const std::vector<std::string>& rank_manifests) {
  Manifest manifest;
  manifest.info = info;
  manifest.world = world;
  std::vector<bool> seen(static_cast<size_t>(world));
  for (const auto& text : rank_manifests) {
    RankManifest rank = parse_rank_manifest(text, "the manifest of a rank");
    if (rank.step != info.step || rank.world != world || rank.rank >= world ||
        seen[static_cast<size_t>(rank.rank)])
      fail(ErrorCode::internal, "rank " + std::to_string(rank.rank) + " of " + std::to_string(rank.world) +
                                    " sent a manifest for step " + std::to_string(rank.step) +
                                    " that does not belong to this save (step " + std::to_string(info.step) +
                                    ", " + std::to_string(world) + " ranks, each once)");
    seen[static_cast<size_t>(rank.rank)] = true;
    for (auto& [name, hash] : rank.files)
      if (!manifest.files.emplace(name, std::move(hash)).second)
        fail(ErrorCode::internal, "file " + in_quotes(name) + " was written by two ranks");
    for (auto& [name, tensor] : rank.tensors) {
      const auto [stored, added] = manifest.tensors.try_emplace(name, tensor);
      if (added) continue;
      if (stored->second.dtype != tensor.dtype || stored->second.shape != tensor.shape)
        fail(ErrorCode::internal,
             "tensor " + in_quotes(name) + " has another shape or type on rank " + std::to_string(rank.rank));
      std::move(tensor.chunks.begin(), tensor.chunks.end(), std::back_inserter(stored->second.chunks));
    }
  }
  for (size_t rank = 0; rank < seen.size(); ++rank)
    if (!seen[rank]) fail(ErrorCode::internal, "rank " + std::to_string(rank) + " sent no manifest");
  for (auto& [name, tensor] : manifest.tensors) {
    std::sort(tensor.chunks.begin(), tensor.chunks.end(), [](const Chunk& a, const Chunk& b) {
      return a.where.offsets != b.where.offsets ? a.where.offsets < b.where.offsets : a.file < b.file;
    });
    std::vector<Region> regions;
    for (const auto& chunk : tensor.chunks) regions.push_back(chunk.where);
    if (const auto problem = tiling_problem(tensor.shape, regions))
      fail(ErrorCode::internal,
           "tensor " + in_quotes(name) + " of shape " + tensor.shape.text() + ": " + *problem);
  }
  return manifest;
}

fs::path Writer::commit(const std::vector<std::string>& rank_manifests) {
  const Manifest manifest = join_manifests(info_, world_, rank_manifests);
  for (const auto& [name, hash] : manifest.files) {
    std::error_code error;
    const auto size = fs::file_size(temporary_ / name, error);
    if (error || static_cast<int64_t>(size) != hash.bytes)
      fail(ErrorCode::io,
           "`" + (temporary_ / name).string() + "` is not there with the " + std::to_string(hash.bytes) +
               " bytes that its rank wrote",
           "checkpoint.save must be a directory that all ranks share");
  }
  const auto file = files_.create(temporary_ / kManifestFile);
  file->write_text(manifest_text(manifest));
  file->finish();
  files_.sync_directory(temporary_);

  const fs::path final = root_ / step_directory_name(info_.step);
  std::error_code error;
  if (fs::symlink_status(final, error).type() == fs::file_type::not_found) {
    files_.rename_new(temporary_, final);
    files_.sync_directory(root_);
    return final;
  }
  // The step was saved before (the run was resumed from an earlier one): exchange them, so that one of them
  // always exists.
  if (!files_.exchange(temporary_, final))
    fail(ErrorCode::io,
         "`" + final.string() + "` exists, and its file system cannot exchange two directories",
         "move it away, then save again");
  swapped_ = true;
  files_.sync_directory(root_);
  try {
    // Removes the old checkpoint.
    files_.remove_tree(temporary_);
  } catch (const Error&) {
    // The save has succeeded, and remove_leftovers() removes the rest later.
  }
  return final;
}

void Writer::abandon() noexcept {
  // This is the old checkpoint, and the new one may not be on the disk.
  if (swapped_) return;
  try {
    std::error_code error;
    if (fs::exists(temporary_, error)) files_.remove_tree(temporary_);
  } catch (...) {
    // Readers ignore the temporary directory.
  }
}

}  // namespace capstan::checkpoint

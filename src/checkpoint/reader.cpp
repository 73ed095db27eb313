#include "checkpoint/reader.hpp"

#include "base/checked.hpp"
#include "base/text.hpp"
#include "checkpoint/store.hpp"

namespace capstan::checkpoint {

namespace fs = std::filesystem;

// Maximum size of a manifest; 1 GiB describes millions of chunks.
static Manifest load_manifest(const fs::path& directory) {
  const fs::path path = directory / kManifestFile;
  std::error_code error;
  const auto status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::not_found)
    fail(ErrorCode::not_found,
         "`" + directory.string() + "` is not a checkpoint: it has no " + std::string(kManifestFile));
  if (status.type() != fs::file_type::regular)
    fail(ErrorCode::format, "`" + path.string() + "` is not a regular file");
  return parse_manifest(read_file(path, uint64_t{1} << 30), path.string());
}

Reader Reader::open(const fs::path& directory, Verification verification) {
  Reader reader;
  reader.directory_ = directory;
  reader.manifest_ = load_manifest(directory);
  const auto problems = verify(directory, verification);
  if (!problems.empty()) {
    std::string more = problems.size() > 1 ? " (and " + std::to_string(problems.size() - 1) + " more)" : "";
    fail(ErrorCode::format,
         "checkpoint `" + directory.string() + "` does not verify: " + problems.front().text + more);
  }
  return reader;
}

const StoredTensor* Reader::find(std::string_view name) const {
  const auto found = manifest_.tensors.find(std::string(name));
  return found == manifest_.tensors.end() ? nullptr : &found->second;
}

std::string Reader::description() const {
  return "checkpoint `" + directory_.string() + "`";
}

std::vector<std::string> Reader::names() const {
  std::vector<std::string> names;
  for (const auto& entry : manifest_.tensors) names.push_back(entry.first);
  return names;
}

const SafetensorsFile& Reader::shard(const std::string& file_name) {
  auto& shard = shards_[file_name];
  if (!shard) shard = std::make_unique<SafetensorsFile>(directory_ / file_name);
  return *shard;
}

void Reader::read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) {
  // Throws with similar names if there is no such tensor.
  at(name);
  const StoredTensor& tensor = *find(name);
  if (!can_convert(tensor.dtype, dtype))
    fail(ErrorCode::unsupported, "tensor " + in_quotes(name) + " is stored as " +
                                     std::string(name_of(tensor.dtype)) + " and cannot be read as " +
                                     std::string(name_of(dtype)));
  if (!fits(wanted, tensor.shape))
    fail(ErrorCode::failed, "tensor " + in_quotes(name) + " has shape " + tensor.shape.text() +
                                " in checkpoint `" + directory_.string() + "`, but region " + wanted.text() +
                                " was requested");
  CAPSTAN_ASSERT(static_cast<int64_t>(out.size()) == wanted.sizes.elements() * size_of(dtype),
                 "size of the destination");
  for (const Chunk& chunk : tensor.chunks) {
    const auto common = intersect(chunk.where, wanted);
    if (!common) continue;
    const SafetensorsFile& file = shard(chunk.file);
    const SafetensorsEntry* entry = file.find(chunk.key);
    if (!entry || entry->dtype != tensor.dtype || entry->shape != chunk.where.sizes)
      fail(ErrorCode::format, "`" + file.path().string() + "`: " +
                                  (entry ? "tensor " + in_quotes(chunk.key) + " is " + entry->dtype_name +
                                               " " + entry->shape.text()
                                         : "no tensor " + in_quotes(chunk.key)) +
                                  ", but the manifest states " + std::string(name_of(tensor.dtype)) + " " +
                                  chunk.where.sizes.text());
    file.copy_region(*entry, *common, chunk.where, wanted, out.data(), dtype);
  }
}

bool Reader::has_file(std::string_view file_name) const {
  return manifest_.files.count(std::string(file_name)) > 0;
}

std::string Reader::read_text(std::string_view file_name) const {
  const auto found = manifest_.files.find(std::string(file_name));
  if (found == manifest_.files.end())
    fail(ErrorCode::not_found,
         "checkpoint `" + directory_.string() + "` has no file " + in_quotes(file_name));
  const fs::path path = directory_ / found->first;
  std::string content = read_file(path, uint64_t{1} << 30);
  if (hash_of(content) != found->second.full)
    fail(ErrorCode::format,
         "`" + path.string() + "` differs from what was written (its hash is not the manifest's)");
  return content;
}

}  // namespace capstan::checkpoint

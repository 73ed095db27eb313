#include "checkpoint/manifest.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "base/json.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

namespace {

constexpr std::string_view kRankSchema = "capstan.checkpoint-rank/1";
constexpr std::string_view kSealBegin = ",\n\"manifest_hash\": \"";
constexpr std::string_view kSealEnd = "\"\n}\n";
constexpr size_t kHashDigits = 32;
// Names appear in file names of tools, in error messages and in keys.
constexpr size_t kMaxTensorName = 1024;
// Limit of the corners of all regions of one tensor, which tiling_problem() keeps in memory (1 GiB at this
// limit).
constexpr size_t kMaxCorners = size_t{1} << 24;

std::string files_text(const std::map<std::string, FileHash>& files) {
  std::string text = "\"files\": {";
  bool first = true;
  for (const auto& [name, hash] : files) {
    text += std::string(first ? "\n" : ",\n") + "  " + in_quotes(name) +
            ": {\"bytes\": " + std::to_string(hash.bytes) + ", \"xxh3_128\": \"" + hash.full +
            "\", \"block_xxh3_64\": [";
    for (size_t i = 0; i < hash.blocks.size(); ++i) text += (i ? ",\"" : "\"") + hash.blocks[i] + "\"";
    text += "]}";
    first = false;
  }
  return text + "\n}";
}

std::string tensors_text(const std::map<std::string, StoredTensor>& tensors) {
  std::string text = "\"tensors\": {";
  bool first = true;
  for (const auto& [name, tensor] : tensors) {
    text += std::string(first ? "\n" : ",\n") + "  " + in_quotes(name) + ": {\"dtype\": \"" +
            std::string(name_of(tensor.dtype)) + "\", \"shape\": " + tensor.shape.text() + ", \"pieces\": [";
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      const Chunk& chunk = tensor.chunks[i];
      text += std::string(i ? ",\n    " : "") + "{\"file\": " + in_quotes(chunk.file) +
              ", \"key\": " + in_quotes(chunk.key) + ", \"offsets\": " + chunk.where.offsets.text() +
              ", \"sizes\": " + chunk.where.sizes.text() + "}";
    }
    text += "]}";
    first = false;
  }
  return text + "\n}";
}

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::map<std::string, FileHash> read_files(const JsonView& view, int64_t block_bytes) {
  std::map<std::string, FileHash> files;
  for (const auto& [name, value] : view.object().items()) {
    const JsonView file = view.item(name, value);
    if (!is_plain_file_name(name) || name == kManifestFile)
      file.refuse("is not a name that a checkpoint's file may have");
    file.only({"bytes", "xxh3_128", "block_xxh3_64"});
    FileHash hash;
    hash.bytes = file.at("bytes").count();
    hash.full = file.at("xxh3_128").string();
    if (!is_hex(hash.full, 32)) file.at("xxh3_128").refuse("is not 32 lower-case hexadecimal digits");
    const JsonView blocks = file.at("block_xxh3_64");
    for (const JsonView& block : blocks.items()) {
      hash.blocks.push_back(block.string());
      if (!is_hex(hash.blocks.back(), 16)) block.refuse("is not 16 lower-case hexadecimal digits");
    }
    const int64_t expected = hash.bytes / block_bytes + (hash.bytes % block_bytes != 0);
    if (static_cast<int64_t>(hash.blocks.size()) != expected)
      blocks.refuse("has " + std::to_string(hash.blocks.size()) + " entries; " + std::to_string(hash.bytes) +
                    " bytes in blocks of " + std::to_string(block_bytes) + " make " +
                    std::to_string(expected));
    files.emplace(name, std::move(hash));
  }
  return files;
}

Shape read_sizes(const JsonView& view) {
  const auto sizes = view.items();
  if (sizes.size() > static_cast<size_t>(Shape::kMaxRank))
    view.refuse("has more than " + std::to_string(Shape::kMaxRank) + " dimensions");
  Shape shape;
  for (const JsonView& size : sizes) shape.push_back(size.count());
  return shape;
}

std::map<std::string, StoredTensor> read_tensors(const JsonView& view,
                                                 const std::map<std::string, FileHash>& files,
                                                 bool complete) {
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [name, value] : view.object().items()) {
    const JsonView entry = view.item(name, value);
    if (name.empty() || name.size() > kMaxTensorName)
      entry.refuse("has a name of " + std::to_string(name.size()) + " bytes");
    entry.only({"dtype", "shape", "pieces"});
    StoredTensor tensor;
    const auto dtype = dtype_from_name(entry.at("dtype").string());
    if (!dtype || name_of(*dtype) != entry.at("dtype").string())
      entry.at("dtype").refuse("is not an element type");
    tensor.dtype = *dtype;
    tensor.shape = read_sizes(entry.at("shape"));
    const auto elements = tensor.shape.try_elements();
    if (!elements || !try_mul(*elements, size_of(*dtype)))
      entry.at("shape").refuse("has more than 2^63 bytes");
    const JsonView chunks = entry.at("pieces");
    const auto listed = chunks.items();
    if (listed.size() > (kMaxCorners >> tensor.shape.size()))
      chunks.refuse("are " + std::to_string(listed.size()) + ": too many");
    std::vector<Region> regions;
    for (const JsonView& item : listed) {
      item.only({"file", "key", "offsets", "sizes"});
      Chunk chunk{item.at("file").string(),
                  item.at("key").string(),
                  {read_sizes(item.at("offsets")), read_sizes(item.at("sizes"))}};
      if (!files.count(chunk.file)) item.at("file").refuse("names a file that the manifest does not list");
      if (!fits(chunk.where, tensor.shape))
        item.refuse("covers " +
                    (chunk.where.offsets.size() == chunk.where.sizes.size()
                         ? chunk.where.text()
                         : "offsets and sizes of different lengths") +
                    " of a tensor of shape " + tensor.shape.text());
      regions.push_back(chunk.where);
      tensor.chunks.push_back(std::move(chunk));
    }
    if (complete)
      if (const auto problem = tiling_problem(tensor.shape, regions)) chunks.refuse("are wrong: " + *problem);
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

}  // namespace

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return is_letter(c) || is_digit(c) || c == '.' || c == '_' || c == '-'; });
}

std::string append_manifest_hash(std::string body) {
  const std::string hash = hash_of(body);
  return std::move(body) + std::string(kSealBegin) + hash + std::string(kSealEnd);
}

std::string manifest_text(const Manifest& manifest) {
  const SaveInfo& info = manifest.info;
  return append_manifest_hash(
      "{\n\"schema\": " + in_quotes(kSchema) + ",\n\"step\": " + std::to_string(info.step) +
      ",\n\"consumed_samples\": " + std::to_string(info.consumed_samples) +
      ",\n\"consumed_tokens\": " + std::to_string(info.consumed_tokens) +
      ",\n\"run_id\": " + in_quotes(info.run_id) + ",\n\"recipe_hash\": " + in_quotes(info.recipe_hash) +
      ",\n\"layout\": " + in_quotes(info.layout) + ",\n\"version\": " + in_quotes(info.version) +
      ",\n\"parent\": " + in_quotes(info.parent) + ",\n\"world\": " + std::to_string(manifest.world) +
      ",\n\"block_bytes\": " + std::to_string(manifest.block_bytes) + ",\n" + files_text(manifest.files) +
      ",\n" + tensors_text(manifest.tensors));
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  const size_t seal = kSealBegin.size() + kHashDigits + kSealEnd.size();
  if (text.size() < seal || !text.ends_with(kSealEnd) ||
      text.substr(text.size() - seal, kSealBegin.size()) != kSealBegin)
    fail(ErrorCode::format,
         file + ": " + std::to_string(text.size()) +
             " bytes that do not end with the manifest's hash (truncated, changed, or not a manifest)");
  const std::string_view body = text.substr(0, text.size() - seal);
  const std::string_view hash = text.substr(text.size() - seal + kSealBegin.size(), kHashDigits);
  if (const std::string actual = hash_of(body); actual != hash)
    fail(ErrorCode::format, file + ": the manifest's own hash is " + std::string(hash) +
                                ", its content gives " + actual + ": the file was changed or damaged");
  const Json document = parse_json(text, file);
  const JsonView view(document, file);
  const std::string& schema = view.at("schema").string();
  if (schema != kSchema) {
    const std::string_view family = kSchema.substr(0, kSchema.rfind('/') + 1);
    if (schema.starts_with(family))
      fail(ErrorCode::unsupported,
           file + ": written in the format " + in_quotes(schema) + "; this program reads " +
               in_quotes(kSchema),
           "use the version of Capstan that wrote it, or a later one");
    view.at("schema").refuse("is " + in_quotes(schema) + "; a checkpoint's is " + in_quotes(kSchema));
  }
  view.only({"schema", "step", "consumed_samples", "consumed_tokens", "run_id", "recipe_hash", "layout",
             "version", "parent", "world", "block_bytes", "files", "tensors", "manifest_hash"});
  Manifest manifest;
  manifest.info = {
      view.at("step").count(),     view.at("consumed_samples").count(), view.at("consumed_tokens").count(),
      view.at("run_id").string(),  view.at("recipe_hash").string(),     view.at("layout").string(),
      view.at("version").string(), view.at("parent").string()};
  manifest.world = view.at("world").count();
  manifest.block_bytes = view.at("block_bytes").count();
  if (manifest.block_bytes < 4096) view.at("block_bytes").refuse("is below 4096");
  manifest.files = read_files(view.at("files"), manifest.block_bytes);
  manifest.tensors = read_tensors(view.at("tensors"), manifest.files, true);
  return manifest;
}

std::string rank_manifest_text(const RankManifest& part) {
  return "{\n\"schema\": " + in_quotes(kRankSchema) + ",\n\"step\": " + std::to_string(part.step) +
         ",\n\"rank\": " + std::to_string(part.rank) + ",\n\"world\": " + std::to_string(part.world) + ",\n" +
         files_text(part.files) + ",\n" + tensors_text(part.tensors) + "\n}\n";
}

RankManifest parse_rank_manifest(std::string_view text, const std::string& file) {
  const Json document = parse_json(text, file);
  const JsonView view(document, file);
  if (view.at("schema").string() != kRankSchema) view.at("schema").refuse("is not " + in_quotes(kRankSchema));
  RankManifest part;
  part.step = view.at("step").count();
  part.rank = view.at("rank").count();
  part.world = view.at("world").count();
  part.files = read_files(view.at("files"), kBlockBytes);
  part.tensors = read_tensors(view.at("tensors"), part.files, false);
  return part;
}

}  // namespace capstan::checkpoint

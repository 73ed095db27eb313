#include "formats/hf_directory.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;
using checkpoint::SafetensorsFile;

std::span<const std::string_view> asset_files() {
  static constexpr std::string_view kFiles[] = {kConfigFile,
                                                "generation_config.json",
                                                "tokenizer.json",
                                                "tokenizer_config.json",
                                                "special_tokens_map.json",
                                                "added_tokens.json",
                                                "vocab.json",
                                                "merges.txt",
                                                "vocab.txt",
                                                "tokenizer.model",
                                                "spiece.model",
                                                "sentencepiece.bpe.model",
                                                "chat_template.jinja",
                                                "chat_template.json",
                                                kIndexFile,
                                                "LICENSE",
                                                kNamesFile};
  return kFiles;
}

bool is_tokenizer_file(std::string_view name) {
  for (const std::string_view file :
       {"tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"})
    if (name == file) return true;
  return false;
}

fs::path file_inside(const fs::path& directory, const std::string& name) {
  const fs::path path = directory / name;
  if (!checkpoint::is_plain_file_name(name))
    fail(ErrorCode::format, in_quotes(name) + " is not a plain file name of `" + directory.string() + "`");
  std::error_code error;
  const auto type = fs::symlink_status(path, error).type();
  if (type == fs::file_type::not_found) fail_not_found("file", path.string());
  if (type == fs::file_type::symlink) {
    const fs::path target = fs::canonical(path, error), home = fs::canonical(directory, error);
    const fs::path blobs =
        home.parent_path().filename() == "snapshots" ? home.parent_path().parent_path() / "blobs" : home;
    if (error || (target.parent_path() != home && target.parent_path() != blobs))
      fail(ErrorCode::format, "`" + path.string() + "` is a link that leads out of the directory",
           "put the file itself there");
  }
  if (!fs::is_regular_file(path, error)) {
    if (error) fail(ErrorCode::io, "cannot read `" + path.string() + "`: " + error.message());
    fail(ErrorCode::format,
         "`" + path.string() + "` is " + std::string(special_file_kind(path)) + ", not a file");
  }
  return path;
}

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
  const Json parsed = parse_json(text, file, 8);
  const JsonView weight_map = JsonView(parsed, file).at("weight_map");
  std::map<std::string, std::string> result;
  for (const auto& [tensor, value] : weight_map.object().items()) {
    const std::string& name = weight_map.item(tensor, value).string();
    if (!checkpoint::is_plain_file_name(name))
      weight_map.item(tensor, value).refuse("is " + in_quotes(name) + ", not a plain file name");
    if (!name.ends_with(".safetensors"))
      weight_map.item(tensor, value).refuse("is " + in_quotes(name) + ", not a safetensors file");
    result.emplace(tensor, name);
  }
  if (result.empty()) weight_map.refuse("names no tensor");
  return result;
}

namespace {

bool is_pickle(const std::string& name) {
  for (const char* suffix : {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json"})
    if (name.ends_with(suffix)) return true;
  return false;
}

[[noreturn]] void no_weights(const fs::path& directory) {
  std::vector<std::string> pickles;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (is_pickle(it->path().filename().string()))
      pickles.push_back("`" + it->path().filename().string() + "`");
  std::sort(pickles.begin(), pickles.end());
  if (pickles.empty())
    fail(ErrorCode::not_found,
         "`" + directory.string() + "` has neither " + std::string(kSingleFile) + " nor " +
             std::string(kIndexFile),
         "name a directory as Transformers' save_pretrained writes it");
  fail(ErrorCode::unsupported,
       "`" + directory.string() + "` holds its weights as pickles (" + join_some(pickles, ", ", 4) +
           "), which are programs: none is ever run",
       "where their origin is trusted, write them again as safetensors: python -c \"from transformers import "
       "AutoModelForCausalLM as M; M.from_pretrained('" +
           directory.string() + "', dtype='auto').save_pretrained('" + directory.string() +
           "-safetensors')\"");
}

}  // namespace

HfDirectory::HfDirectory(const fs::path& directory) : directory_(directory) {
  std::error_code error;
  if (!fs::exists(directory, error))
    fail_not_found("model", "hf:" + directory.string(),
                   "hf: takes the directory that holds config.json and the safetensors files");
  if (!fs::is_directory(directory, error))
    fail(ErrorCode::format, "`" + directory.string() + "` is not a directory",
         "hf: takes the directory that holds config.json and the safetensors files");
  if (has_file(kSingleFile)) {
    files_.push_back(std::make_unique<SafetensorsFile>(file_inside(directory, std::string(kSingleFile))));
    add(*files_.back());
    return;
  }
  if (!has_file(kIndexFile)) no_weights(directory);
  const std::string index_path = (directory / kIndexFile).string();
  const auto index = parse_index(read_text(kIndexFile), index_path);
  std::set<std::string> names;
  for (const auto& [tensor, file] : index) names.insert(file);
  for (const std::string& name : names) {
    files_.push_back(std::make_unique<SafetensorsFile>(file_inside(directory, name)));
    for (const auto& entry : files_.back()->entries()) {
      const auto found = index.find(entry.name);
      if (found == index.end() || found->second != name)
        fail(ErrorCode::format,
             "`" + files_.back()->path().string() + "` holds the tensor " + in_quotes(entry.name) +
                 ", which `" + index_path + "` " +
                 (found == index.end() ? "does not list" : "assigns to `" + found->second + "`"));
    }
    add(*files_.back());
  }
  for (const auto& [tensor, file] : index)
    if (!tensors_.count(tensor))
      fail(ErrorCode::format, "`" + index_path + "` puts the tensor " + in_quotes(tensor) + " into `" + file +
                                  "`, which does not hold it");
}

void HfDirectory::add(const SafetensorsFile& file) {
  for (const auto& entry : file.entries()) {
    HfTensor stored;
    // A tensor of an unsupported type is allowed and never read.
    stored.dtype = entry.dtype.value_or(DType::u8);
    stored.shape = entry.shape;
    stored.file = &file;
    stored.entry = &entry;
    tensors_.emplace(entry.name, stored);
  }
}

std::vector<fs::path> HfDirectory::weight_files() const {
  std::vector<fs::path> result;
  for (const auto& file : files_) result.push_back(file->path());
  return result;
}

bool HfDirectory::has_file(std::string_view name) const {
  std::error_code error;
  return fs::symlink_status(directory_ / name, error).type() != fs::file_type::not_found;
}

std::string HfDirectory::read_text(std::string_view name) const {
  return read_file(file_inside(directory_, std::string(name)), uint64_t{1} << 30);
}

std::vector<std::string> HfDirectory::assets() const {
  std::vector<std::string> result;
  for (const std::string_view name : asset_files())
    if (name != kNamesFile && has_file(name)) result.emplace_back(name);
  return result;
}

std::span<const std::byte> HfDirectory::bytes(std::string_view name) const {
  const HfTensor& tensor = entry(name);
  return tensor.file->bytes(*tensor.entry);
}

void HfDirectory::read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) {
  const HfTensor& tensor = entry(name);
  if (!tensor.entry->dtype || !can_convert(tensor.dtype, dtype))
    fail(ErrorCode::unsupported,
         description() + ": the tensor " + in_quotes(name) + " is " + tensor.entry->dtype_name +
             " and cannot be read as " + std::string(name_of(dtype)),
         "weights are read as F32, BF16 and F16");
  CAPSTAN_ASSERT(fits(wanted, tensor.shape) &&
                     static_cast<int64_t>(out.size()) == wanted.sizes.elements() * size_of(dtype),
                 "a region of " + std::string(name));
  tensor.file->copy_region(*tensor.entry, wanted, full_region(tensor.shape), wanted, out.data(), dtype);
}

}  // namespace capstan::formats

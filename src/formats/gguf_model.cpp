// The ExternalModel of gguf:FILE, and the writer of GGUF files.
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/safetensors.hpp"
#include "config/core/external.hpp"
#include "formats/convert.hpp"
#include "formats/formats.hpp"
#include "formats/gguf_arch.hpp"
#include "formats/gguf_tokenizer.hpp"
#include "formats/hf_directory.hpp"
#include "formats/new_directory.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;

namespace {

class GgufModelFile final : public ExternalModel {
 public:
  GgufModelFile(const std::string& name, const fs::path& path) : file_(path) {
    name_ = name;
    read_ = read_gguf_model(file_);
    model_ = read_.model;
    names_ = read_.names;
    take_tensors([](std::string_view tensor) { return tensor == kRopeFactors; });
  }

  std::string kind() const override { return read_.architecture + " in GGUF"; }
  checkpoint::TensorSource& files() override { return file_; }
  std::vector<fs::path> weight_files() const override { return {file_.path()}; }
  std::string tokenizer() const override {
    return file_.metadata().count("tokenizer.ggml.tokens") ? config::absolute_name(name_, fs::current_path())
                                                           : "";
  }
  std::vector<std::pair<std::string, std::string>> assets() const override {
    std::vector<std::pair<std::string, std::string>> files;
    if (std::string text = tokenizer_json_of(file_.metadata(), file_.description()); !text.empty())
      files.emplace_back("tokenizer.json", std::move(text));
    if (std::string text = tokenizer_config_of(file_.metadata()); !text.empty())
      files.emplace_back("tokenizer_config.json", std::move(text));
    if (std::string text = generation_config_of(file_.metadata()); !text.empty())
      files.emplace_back("generation_config.json", std::move(text));
    return files;
  }

 private:
  GgufFile file_;
  GgufModel read_;
};

// Tensors that readers expect in fp32, whatever the file's type.
bool stays_fp32(const std::string& name, const Shape& shape) {
  return shape.size() < 2 || name.ends_with(".bias") || name.find("_norm.") != std::string::npos ||
         name.find("ffn_gate_inp.") != std::string::npos || name.starts_with("position_embd");
}

struct FileType {
  GgufType type;
  // Value of general.file_type.
  int64_t number;
  // Element type of matrices.
  uint32_t tensors;
};
constexpr FileType kFileTypes[] = {{GgufType::f32, 0, kGgmlF32},
                                   {GgufType::f16, 1, kGgmlF16},
                                   {GgufType::q8_0, 7, kGgmlQ8_0},
                                   {GgufType::bf16, 32, kGgmlBf16}};

uint32_t type_in_file(const FileType& file, const std::string& name, const Shape& shape) {
  if (stays_fp32(name, shape)) return kGgmlF32;
  return file.tensors == kGgmlQ8_0 && shape.back() % 32 != 0 ? kGgmlF16 : file.tensors;
}

// Returns the metadata of the tokenizer in the auxiliary files; empty if there is none.
std::vector<std::pair<std::string, GgufValue>> tokenizer_entries(const ExportSource& from) {
  const auto assets = [&](std::string_view name) -> std::string {
    for (const auto& [file, text] : from.assets)
      if (file == name) return text;
    return "";
  };
  if (const std::string tokenizer = assets("tokenizer.json"); !tokenizer.empty())
    return gguf_tokenizer(tokenizer, assets("tokenizer_config.json"), assets("generation_config.json"),
                          assets("chat_template.jinja"), from.model.vocab_size);
  if (!assets("tokenizer.model").empty()) return gguf_sentencepiece(from.assets, from.model.vocab_size);
  for (const auto& [name, text] : from.assets)
    if (is_tokenizer_file(name))
      fail(ErrorCode::unsupported,
           "a GGUF file takes the tokenizer of a tokenizer.json or a tokenizer.model, not `" + name + "`",
           "Transformers writes a tokenizer.json: python -c \"from transformers import AutoTokenizer as T; "
           "T.from_pretrained('DIR').save_pretrained('DIR')\"");
  return {};
}

}  // namespace

std::unique_ptr<ExternalModel> open_gguf(const std::string& name, const fs::path& file) {
  return std::make_unique<GgufModelFile>(name, file);
}

WriteResult write_gguf(const ExportSource& from, const fs::path& to, GgufType type) {
  require_new(to);
  const GgufPlan plan = plan_gguf(from.model);
  const FileType& file_type = *std::find_if(std::begin(kFileTypes), std::end(kFileTypes),
                                            [&](const FileType& one) { return one.type == type; });
  RearrangedSource source(*from.parameters, inverted(parameter_table(from.model, plan.names)));

  std::vector<std::pair<std::string, GgufValue>> metadata = {
      {"general.architecture", gguf_text(plan.architecture)},
      {"general.name", gguf_text(to.stem().string())},
      {"general.file_type", gguf_integer(file_type.number)}};
  if (type == GgufType::q8_0) metadata.emplace_back("general.quantization_version", gguf_integer(2));
  metadata.insert(metadata.end(), plan.metadata.begin(), plan.metadata.end());
  bool has_tokenizer = false;
  for (auto& entry : tokenizer_entries(from)) {
    metadata.push_back(std::move(entry));
    has_tokenizer = true;
  }

  std::vector<GgufTensor> tensors;
  for (const std::string& name : source.names()) {
    const auto& shape = source.at(name).shape;
    tensors.push_back({name, shape, type_in_file(file_type, name, shape), 0, 0});
  }
  if (!plan.rope_factors.empty())
    tensors.push_back(
        {std::string(kRopeFactors), {static_cast<int64_t>(plan.rope_factors.size())}, kGgmlF32, 0, 0});
  const std::string header = gguf_header(metadata, tensors);

  fs::path temporary = to;
  temporary += ".tmp-" + std::to_string(::getpid());
  struct Remove {
    const fs::path& path;
    // Has no effect after a successful rename, because the file no longer has this name.
    ~Remove() { ::unlink(path.c_str()); }
  } remove{temporary};
  FileWriter writer(temporary);
  writer.write(header);
  WriteResult written;
  std::vector<float> values;
  std::vector<std::byte> bytes;
  for (const GgufTensor& tensor : tensors) {
    size_t given = 0;
    // Writes row by row, because blocks of a quantized type do not cross rows.
    for (const auto& rows :
         checkpoint::row_slabs(full_region(tensor.shape), DType::f32, checkpoint::kChunkBytes)) {
      if (tensor.name == kRopeFactors) {
        values = plan.rope_factors;
      } else {
        values.resize(static_cast<size_t>(rows.sizes.elements()));
        source.read(tensor.name, DType::f32, rows, std::as_writable_bytes(std::span(values)));
      }
      try {
        quantize(*find_ggml_type(tensor.type), values, bytes);
      } catch (const Error& error) {
        fail(error.code(), "the tensor " + in_quotes(tensor.name) + ": " + error.message(),
             error.marked_help());
      }
      given += bytes.size();
      writer.write(bytes);
    }
    CAPSTAN_ASSERT(given == tensor.bytes, "bytes of " + tensor.name);
    writer.write(std::vector<std::byte>((kGgufAlignment - given % kGgufAlignment) % kGgufAlignment));
    ++written.tensors;
    written.bytes += static_cast<int64_t>(tensor.bytes);
  }
  writer.finish();
  rename_new(temporary, to);
  written.files = {to.filename().string()};
  written.kind = plan.architecture + " in GGUF";
  written.tokenizer = has_tokenizer;
  return written;
}

}  // namespace capstan::formats

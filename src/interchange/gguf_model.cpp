// gguf:FILE as a ForeignModel, and the writer.
#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "interchange/convert.hpp"
#include "interchange/formats.hpp"
#include "interchange/gguf_arch.hpp"
#include "interchange/gguf_tokenizer.hpp"
#include "interchange/new_directory.hpp"

namespace capstan::interchange {

namespace fs = std::filesystem;

namespace {

class GgufModelFile final : public ForeignModel {
 public:
  GgufModelFile(const std::string& name, const fs::path& path) : file_(path) {
    name_ = name;
    read_ = read_gguf_model(file_);
    model_ = read_.model;
    std::map<DType, int64_t> elements;
    std::vector<std::string> left;
    const ArrangementTable table = parameter_table(model_, read_.names);
    for (const std::string& tensor : file_.names()) {
      elements[file_.at(tensor).dtype] += checkpoint::element_count(file_.at(tensor).shape);
      if (!table.sources.count(tensor) && tensor != kRopeFactors) left.push_back(capstan::quoted(tensor));
    }
    for (const auto& [type, count] : elements)
      if (count > elements[dtype_]) dtype_ = type;
    if (left.empty()) return;
    fail(ErrorCode::unsupported, file_.place() + ": " + std::to_string(left.size()) +
                                     (left.size() == 1 ? " tensor has" : " tensors have") +
                                     " no place in a " + read_.architecture + ":\n    " +
                                     join_some(left, "\n    ", 8));
  }

  std::string kind() const override { return read_.architecture + " in GGUF"; }
  checkpoint::TensorSource& files() override { return file_; }
  std::unique_ptr<checkpoint::TensorSource> arranged(checkpoint::TensorSource& files,
                                                     const config::ModelConfig& model) const override {
    config::ModelConfig ours = model_;
    ours.padded_vocab_size = model.padded_vocab_size;
    return std::make_unique<RearrangedSource>(files, parameter_table(ours, read_.names));
  }
  std::vector<fs::path> weight_files() const override { return {file_.path()}; }
  std::string tokenizer() const override {
    return file_.metadata().count("tokenizer.ggml.tokens") ? absolute_name(name_) : "";
  }
  std::vector<std::pair<std::string, std::string>> carried() const override {
    std::vector<std::pair<std::string, std::string>> files;
    if (std::string text = tokenizer_json_of(file_.metadata(), file_.place()); !text.empty())
      files.emplace_back("tokenizer.json", std::move(text));
    if (std::string text = tokenizer_config_of(file_.metadata()); !text.empty())
      files.emplace_back("tokenizer_config.json", std::move(text));
    return files;
  }

 private:
  GgufFile file_;
  GgufModel read_;
};

// What readers expect in fp32 whatever the file's type is.
bool stays_fp32(const std::string& name, const checkpoint::Shape& shape) {
  return shape.size() < 2 || name.find("_norm.") != std::string::npos || name.starts_with("position_embd");
}

const GgmlType& type_in_file(GgufType wanted, const std::string& name, const checkpoint::Shape& shape) {
  uint32_t id = kGgmlF32;
  if (!stays_fp32(name, shape)) {
    if (wanted == GgufType::f16) id = kGgmlF16;
    if (wanted == GgufType::bf16) id = kGgmlBf16;
    if (wanted == GgufType::q8_0) id = shape.back() % 32 == 0 ? kGgmlQ8_0 : kGgmlF16;
  }
  return *find_ggml_type(id);
}

// general.file_type
int64_t file_type(GgufType type) {
  switch (type) {
    case GgufType::f32:
      return 0;
    case GgufType::f16:
      return 1;
    case GgufType::q8_0:
      return 7;
    case GgufType::bf16:
      return 32;
  }
  return 0;
}

}  // namespace

std::unique_ptr<ForeignModel> open_gguf(const std::string& name, const fs::path& file) {
  return std::make_unique<GgufModelFile>(name, file);
}

Written write_gguf(const Exported& from, const fs::path& to, GgufType type) {
  require_new(to);
  const GgufPlan plan = plan_gguf(from.model);
  RearrangedSource source(*from.parameters, inverted(parameter_table(from.model, plan.names)));

  std::vector<std::pair<std::string, GgufValue>> metadata = {
      {"general.architecture", gguf_text(plan.architecture)},
      {"general.name", gguf_text(to.stem().string())},
      {"general.file_type", gguf_integer(file_type(type))}};
  if (type == GgufType::q8_0) metadata.emplace_back("general.quantization_version", gguf_integer(2));
  metadata.insert(metadata.end(), plan.metadata.begin(), plan.metadata.end());
  const auto carried = [&](std::string_view name) -> std::string {
    for (const auto& [file, text] : from.carried)
      if (file == name) return text;
    return "";
  };
  if (const std::string tokenizer = carried("tokenizer.json"); !tokenizer.empty())
    for (auto& entry : gguf_tokenizer(tokenizer, carried("tokenizer_config.json"),
                                      carried("chat_template.jinja"), from.model.vocab_size))
      metadata.push_back(std::move(entry));

  std::vector<GgufTensor> tensors;
  for (const std::string& name : source.names()) {
    const auto& shape = source.at(name).shape;
    tensors.push_back({name, shape, type_in_file(type, name, shape).id, 0, 0});
  }
  if (!plan.rope_factors.empty())
    tensors.push_back(
        {std::string(kRopeFactors), {static_cast<int64_t>(plan.rope_factors.size())}, kGgmlF32, 0, 0});
  const std::string header = gguf_header(metadata, tensors);

  fs::path temporary = to;
  temporary += ".tmp-" + std::to_string(::getpid());
  struct Remove {
    const fs::path& path;
    ~Remove() { ::unlink(path.c_str()); }  // renamed: nothing is there
  } remove{temporary};
  FileWriter writer(temporary);
  writer.write(header);
  Written written;
  std::vector<float> values;
  std::vector<std::byte> bytes;
  for (const GgufTensor& tensor : tensors) {
    if (tensor.name == kRopeFactors) {
      values = plan.rope_factors;
    } else {
      values.resize(static_cast<size_t>(checkpoint::element_count(tensor.shape)));
      source.read_whole(tensor.name, DType::f32, std::as_writable_bytes(std::span(values)));
    }
    quantise(*find_ggml_type(tensor.type), values, bytes);
    CAPSTAN_ASSERT(bytes.size() == tensor.bytes, "bytes of " + tensor.name);
    bytes.resize((bytes.size() + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment);
    writer.write(bytes);
    ++written.tensors;
    written.bytes += static_cast<int64_t>(tensor.bytes);
  }
  writer.finish();
  rename_new(temporary, to);
  written.files = {to.filename().string()};
  written.kind = plan.architecture + " in GGUF";
  return written;
}

}  // namespace capstan::interchange

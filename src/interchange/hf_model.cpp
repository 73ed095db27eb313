// hf:DIR as a ForeignModel.
#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "interchange/family.hpp"
#include "interchange/formats.hpp"
#include "interchange/hf_config.hpp"
#include "interchange/hf_directory.hpp"

namespace capstan::interchange {

namespace {

// Buffers that old files hold among the weights: they follow from the sizes.
bool is_buffer(std::string_view name) {
  for (const std::string_view suffix : {"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"})
    if (name.ends_with(suffix)) return true;
  return false;
}

class HfModelFiles final : public ForeignModel {
 public:
  HfModelFiles(const std::string& name, const std::filesystem::path& path) : directory_(path) {
    name_ = name;
    const HfModel read = read_hf_config(directory_.read_text(kConfigFile), (path / kConfigFile).string());
    family_ = read.family;
    model_ = read.model;
    names_ = family_->names;
    if (!directory_.find(names_.embedding + ".weight")) names_ = family_->bare_names();
    check_tensors();
    std::map<DType, int64_t> elements;
    for (const std::string& tensor : directory_.names())
      elements[directory_.at(tensor).dtype] += checkpoint::element_count(directory_.at(tensor).shape);
    for (const auto& [type, count] : elements)
      if (count > elements[dtype_]) dtype_ = type;
  }

  std::string kind() const override { return std::string(family_->model_type) + " in safetensors"; }

  checkpoint::TensorSource& files() override { return directory_; }
  std::unique_ptr<checkpoint::TensorSource> arranged(checkpoint::TensorSource& files,
                                                     const config::ModelConfig& model) const override {
    config::ModelConfig ours = model_;
    ours.padded_vocab_size = model.padded_vocab_size;
    return std::make_unique<RearrangedSource>(files, parameter_table(ours, names_));
  }

  std::vector<std::filesystem::path> weight_files() const override { return directory_.weight_files(); }

  std::string tokenizer() const override {
    const bool there = directory_.has_file("tokenizer.json") || directory_.has_file("tokenizer.model") ||
                       (directory_.has_file("vocab.json") && directory_.has_file("merges.txt"));
    return there ? std::filesystem::absolute(directory_.directory()).lexically_normal().string() : "";
  }

  std::vector<std::pair<std::string, std::string>> carried() const override {
    std::vector<std::pair<std::string, std::string>> files;
    for (const std::string& name : directory_.carried()) files.emplace_back(name, directory_.read_text(name));
    if (names_.embedding != family_->names.embedding) files.emplace_back(kNamesFile, "without prefix\n");
    return files;
  }

 private:
  // Nothing may be left over: a tensor that the model does not use means that it is another model.
  void check_tensors() {
    const ArrangementTable table = parameter_table(model_, names_);
    const std::string head = names_.head + ".weight", embedding = names_.embedding + ".weight";
    std::vector<std::string> left;
    for (const std::string& tensor : directory_.names()) {
      if (table.sources.count(tensor) || is_buffer(tensor)) continue;
      if (tensor == head && model_.share_embeddings_and_output_weights && same(head, embedding)) continue;
      left.push_back(capstan::quoted(tensor) +
                     (tensor == head
                          ? " (`tie_word_embeddings` says that the head is the embedding, and they differ)"
                          : ""));
    }
    if (left.empty()) return;
    const size_t count = left.size();
    fail(ErrorCode::unsupported, directory_.place() + ": " + std::to_string(count) +
                                     (count == 1 ? " tensor has" : " tensors have") + " no place in a " +
                                     family_->model_type + " with this config.json:\n    " +
                                     join_some(left, "\n    ", 8));
  }

  bool same(const std::string& a, const std::string& b) {
    const auto *x = directory_.find(a), *y = directory_.find(b);
    if (!y || x->dtype != y->dtype || x->shape != y->shape) return false;
    const auto bytes = static_cast<size_t>(checkpoint::element_count(x->shape) * size_of(x->dtype));
    std::vector<std::byte> first(bytes), second(bytes);
    directory_.read_whole(a, x->dtype, first);
    directory_.read_whole(b, y->dtype, second);
    return std::memcmp(first.data(), second.data(), bytes) == 0;
  }

  HfDirectory directory_;
  const Family* family_ = nullptr;
  TensorNames names_;
};

}  // namespace

std::unique_ptr<ForeignModel> open_hf(const std::string& name, const std::filesystem::path& directory) {
  return std::make_unique<HfModelFiles>(name, directory);
}

}  // namespace capstan::interchange

// The ExternalModel of hf:DIR.
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "formats/family.hpp"
#include "formats/formats.hpp"
#include "formats/fp8_weights.hpp"
#include "formats/hf_config.hpp"
#include "formats/hf_directory.hpp"
#include "formats/mxfp4_weights.hpp"

namespace capstan::formats {

namespace {

// Buffers that old files store with the weights, and that can be computed from the sizes.
bool is_buffer(std::string_view name) {
  for (const std::string_view suffix : {"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"})
    if (name.ends_with(suffix)) return true;
  return false;
}

class HfModelFiles final : public ExternalModel {
 public:
  HfModelFiles(const std::string& name, const std::filesystem::path& path)
      : directory_(path), from_fp8_(directory_), tensors_(from_fp8_) {
    name_ = name;
    const HfModel read = read_hf_config(directory_.read_text(kConfigFile), (path / kConfigFile).string());
    family_ = read.family;
    model_ = read.model;
    names_ = family_->names;
    if (!directory_.find(names_.embedding + ".weight")) names_ = family_->bare_names();
    // A tied model's file may contain the head too.
    take_tensors([&](std::string_view tensor) {
      return is_buffer(tensor) || is_of_prediction_layer(tensor) ||
             (tensor == head() && model_.share_embeddings_and_output_weights);
    });
  }

  std::string kind() const override { return std::string(family_->model_type) + " in safetensors"; }

  checkpoint::TensorSource& files() override { return tensors_; }
  std::vector<std::filesystem::path> weight_files() const override { return directory_.weight_files(); }

  std::string tokenizer() const override {
    const bool there = directory_.has_file("tokenizer.json") || directory_.has_file("tokenizer.model") ||
                       (directory_.has_file("vocab.json") && directory_.has_file("merges.txt"));
    return there ? std::filesystem::absolute(directory_.directory()).lexically_normal().string() : "";
  }

  std::vector<std::pair<std::string, std::string>> assets() const override {
    std::vector<std::pair<std::string, std::string>> files;
    for (const std::string& name : directory_.assets()) files.emplace_back(name, directory_.read_text(name));
    if (names_.embedding != family_->names.embedding) files.emplace_back(kNamesFile, "without prefix\n");
    return files;
  }

 private:
  std::string head() const { return names_.head + ".weight"; }

  // "model.layers.61.…" of a model of 61 layers.
  bool is_of_prediction_layer(std::string_view tensor) const {
    const std::string before = names_.layer.substr(0, names_.layer.find("{}"));
    if (!family_->has_prediction_layers || !tensor.starts_with(before)) return false;
    tensor.remove_prefix(before.size());
    const auto layer = parse_int(tensor.substr(0, tensor.find('.')));
    return layer && *layer >= model_.num_layers;
  }

  void check_weights() override {
    const std::string embedding = names_.embedding + ".weight";
    const auto *x = directory_.find(head()), *y = directory_.find(embedding);
    if (!model_.share_embeddings_and_output_weights || !x || !y) return;
    const auto a = directory_.bytes(head()), b = directory_.bytes(embedding);
    if (x->dtype != y->dtype || a.size() != b.size() || std::memcmp(a.data(), b.data(), a.size()) != 0)
      fail(ErrorCode::unsupported,
           directory_.description() + ": `tie_word_embeddings` says that the head is the embedding, and " +
               in_quotes(head()) + " differs from " + in_quotes(embedding),
           "say `\"tie_word_embeddings\": false` in config.json if the head is one of its own");
  }

  HfDirectory directory_;
  // The directory's tensors, dequantized: from FP8, and then from MXFP4.
  Fp8Weights from_fp8_;
  Mxfp4Weights tensors_;
  const Family* family_ = nullptr;
};

}  // namespace

std::unique_ptr<ExternalModel> open_hf(const std::string& name, const std::filesystem::path& directory) {
  return std::make_unique<HfModelFiles>(name, directory);
}

}  // namespace capstan::formats

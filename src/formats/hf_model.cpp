// The ExternalModel of hf:DIR.
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
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
  for (const std::string_view suffix : {"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias",
                                        ".attention.bias", ".attention.masked_bias"})
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
    if (family_->has_prediction_layers) find_prediction_layers(read.prediction_layers);
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

  // named: in config.json; nullopt: the key is missing, and the class has one layer.
  void find_prediction_layers(std::optional<int64_t> named) {
    std::string present;
    for (const std::string& tensor : tensors_.names())
      if (present.empty() && is_of_prediction_layer(tensor)) present = tensor;
    const int64_t count = named.value_or(present.empty() ? 0 : 1);
    int64_t& complete = prediction_layers_.count;
    std::string problem;
    while (complete < count && (problem = problem_of_prediction_layer(complete)).empty()) ++complete;
    const std::string value =
        "`" + std::string(kPredictionLayers) + "` is " + std::to_string(count) + ", and ";
    if (complete < count)
      prediction_layers_.left_out =
          counted(count - complete, "layer") + " for multi-token prediction left out: " + value + problem;
    else if (const std::string further = further_tensor(count); !further.empty())
      prediction_layers_.left_out =
          "tensors for multi-token prediction left out: " + value + "the files have " + in_quotes(further);
  }

  // Which tensor of the layer is not there as the model's sizes ask for it; empty: none.
  std::string problem_of_prediction_layer(int64_t depth) const {
    config::ModelConfig with = model_;
    with.mtp_num_layers = depth + 1;
    const std::string layer = layer_prefix(names_, model_.num_layers + depth);
    for (const auto& [tensor, shape] : parameter_table(with, names_).sources) {
      if (!tensor.starts_with(layer)) continue;
      const auto* stored = tensors_.find(tensor);
      if (!stored) return in_quotes(tensor) + " is missing";
      if (stored->shape != shape)
        return in_quotes(tensor) + " is " + stored->shape.text() + " and should be " + shape.text();
    }
    return {};
  }

  // A tensor of a layer that follows the first `count` layers for multi-token prediction, or of none of their
  // parameters; empty: there is none.
  std::string further_tensor(int64_t count) const {
    config::ModelConfig with = model_;
    if (count > 0) with.mtp_num_layers = count;
    const ArrangementTable table = file_table(with, names_);
    for (const std::string& tensor : tensors_.names())
      if (is_of_prediction_layer(tensor) && !is_buffer(tensor) && !table.targets.count(tensor)) return tensor;
    return {};
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

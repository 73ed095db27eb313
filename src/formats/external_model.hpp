// A model of another program, named `hf:DIR` or `gguf:FILE`: its architecture as a model section, and its
// weights under Capstan's names.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "config/resolve/resolve.hpp"
#include "config/sections/model.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::formats {

// The layers of multi-token prediction of a model.
struct PredictionLayers {
  // Those that config.json names and of which the files have all tensors, counted from the first.
  int64_t count = 0;
  // A line about the others that config.json names or that the files have; empty: there are none.
  std::string left_out;
};

class ExternalModel {
 public:
  // Opens a model and reads everything except the weights' bytes. Throws ErrorCode::not_found, ::format, or
  // ::unsupported with all unsupported settings.
  static std::unique_ptr<ExternalModel> open(const std::string& name);
  virtual ~ExternalModel() = default;

  // The name that was passed to open().
  const std::string& name() const { return name_; }
  // The model section, including derived values. It has no layers of multi-token prediction: the recipe of a
  // run decides whether they are read.
  const config::ModelConfig& model() const { return model_; }
  const PredictionLayers& prediction_layers() const { return prediction_layers_; }
  // Those that a conversion keeps: prediction_layers() up to the first whose own copy of embedding or head
  // differs from the model's, because a model has one of each. Reads the copies.
  PredictionLayers kept_prediction_layers();
  // Type of most weights; fp32 for quantized weights.
  DType dtype() const { return dtype_; }
  // "llama in safetensors", for messages.
  virtual std::string kind() const = 0;

  // The model's parameters, read from the files on demand. The result keeps a reference to this object.
  // model: the model of the run, which determines the vocabulary padding. Throws ErrorCode::format or
  // ::unsupported for weights that do not fit the model.
  std::unique_ptr<checkpoint::TensorSource> parameters(const config::ModelConfig& model) {
    check_weights();
    return arranged(files(), model);
  }
  // The tensors under the files' names, and the same mapping for any tensors with these names and shapes.
  virtual checkpoint::TensorSource& files() = 0;
  std::unique_ptr<checkpoint::TensorSource> arranged(checkpoint::TensorSource& files,
                                                     const config::ModelConfig& model) const;

  // A hash of the bytes of its weight files, independent of their names. Reads all of them.
  std::string content_hash() const;
  virtual std::vector<std::filesystem::path> weight_files() const = 0;

  // The tokenizer.tokenizer_model that reads its tokenizer; empty: it has none.
  virtual std::string tokenizer() const = 0;
  // Tokenizer and auxiliary files that a checkpoint keeps with the weights: name and content.
  virtual std::vector<std::pair<std::string, std::string>> assets() const = 0;

 protected:
  // Sets dtype_, and refuses tensors that model_ does not have under names_. Ignores tensors for which
  // `beside` is true.
  void take_tensors(const std::function<bool(std::string_view tensor)>& beside);
  // Makes the checks that read the weights' bytes.
  virtual void check_weights() {}

  std::string name_;
  config::ModelConfig model_;
  PredictionLayers prediction_layers_;
  TensorNames names_;
  DType dtype_ = DType::f32;
};

// The lines of the model section, for `model: hf:DIR`.
std::string model_preset(const std::string& name);
// A complete recipe for the model, for evaluation, generation and converted checkpoints. The compute type is
// that of the weights, fp32 for fp16. prediction_layers: model.mtp_num_layers; 0: null.
std::string recipe_text(const ExternalModel& model, int64_t prediction_layers = 0);
config::Resolution resolve_recipe(const ExternalModel& model, config::Request request = {},
                                  int64_t prediction_layers = 0);

// Registers `model: hf:DIR` and `model: gguf:FILE` for all recipes.
void use_in_recipes();

}  // namespace capstan::formats

// A model that another program wrote, named `hf:DIR` or `gguf:FILE`: what it computes, in the terms of a recipe, and its weights
// under Capstan's names.
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
#include "config/core/resolve.hpp"
#include "config/sections/model.hpp"
#include "formats/parameter_table.hpp"

namespace capstan::interchange {

bool is_external(std::string_view name);  // begins with hf: or gguf:
// The path without its scheme, absolute.
std::string absolute_name(const std::string& name);

class ExternalModel {
 public:
  // Reads everything but the weights' bytes. ErrorCode::not_found, ::format; ::unsupported with all that this version would not
  // compute as the file says.
  static std::unique_ptr<ExternalModel> open(const std::string& name);
  virtual ~ExternalModel() = default;

  const std::string& name() const { return name_; }            // as it was given
  const config::ModelConfig& model() const { return model_; }  // with its derived values
  DType dtype() const { return dtype_; }                       // of most weights; fp32 for quantized ones
  virtual std::string kind() const = 0;                        // "llama in safetensors", for messages

  // Its parameters, read from the files as they are asked for; refers to this. model: that of the run, whose padding of the
  // vocabulary counts. ErrorCode::format, ::unsupported for weights that are not those of the model.
  std::unique_ptr<checkpoint::TensorSource> parameters(const config::ModelConfig& model) {
    check_weights();
    return arranged(files(), model);
  }
  // The tensors as the files name them, and the same arrangement of any tensors with these names and shapes.
  virtual checkpoint::TensorSource& files() = 0;
  std::unique_ptr<checkpoint::TensorSource> arranged(checkpoint::TensorSource& files,
                                                     const config::ModelConfig& model) const;

  // Of the bytes of its files of weights, whatever they are called: reads them all.
  std::string content_hash() const;
  virtual std::vector<std::filesystem::path> weight_files() const = 0;

  // What tokenizer.tokenizer_model may be to read its tokenizer; empty: it has none.
  virtual std::string tokenizer() const = 0;
  // Small files that travel with the weights into a checkpoint: name and content.
  virtual std::vector<std::pair<std::string, std::string>> assets() const = 0;

 protected:
  // Sets dtype_, and refuses tensors that have no place in model_ under names_: then it is another model. `beside` may be there.
  void take_tensors(const std::function<bool(std::string_view tensor)>& beside);
  virtual void check_weights() {}  // what takes their bytes, and so is left until they are read

  std::string name_;
  config::ModelConfig model_;
  TensorNames names_;
  DType dtype_ = DType::f32;
};

// The lines of the model section, for `model: hf:DIR`.
std::string model_preset(const std::string& name);
// A whole recipe for the model: evaluation and generation resolve it, and a converted checkpoint carries it. Computes in the
// weights' type; fp16 in fp32.
std::string recipe_text(const ExternalModel& model);
config::Resolution resolve_recipe(const ExternalModel& model, config::Request request = {});

// From here on `model: hf:DIR` and `model: gguf:FILE` are known wherever recipes are read.
void use_in_recipes();

}  // namespace capstan::interchange

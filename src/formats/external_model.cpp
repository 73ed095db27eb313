#include "formats/external_model.hpp"

#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/hash.hpp"
#include "checkpoint/safetensors.hpp"
#include "config/core/emit.hpp"
#include "config/core/external.hpp"
#include "config/core/library.hpp"
#include "config/tools/edit.hpp"
#include "formats/formats.hpp"
#include "formats/model_section.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;

std::unique_ptr<ExternalModel> ExternalModel::open(const std::string& name) {
  CAPSTAN_ASSERT(config::is_external_model("model", name), "the name of another program's model");
  const auto [scheme, path] = config::split_scheme(name);
  if (path.empty()) fail(ErrorCode::usage, "`" + name + "` names nothing", "write hf:DIRECTORY or gguf:FILE");
  return scheme == "hf:" ? open_hf(name, std::string(path)) : open_gguf(name, std::string(path));
}

std::string ExternalModel::content_hash() const {
  std::string hashes;
  for (const fs::path& file : weight_files()) hashes += checkpoint::hash_file(file).full + "\n";
  return checkpoint::hash_of(hashes);
}

void ExternalModel::take_tensors(const std::function<bool(std::string_view)>& beside) {
  const ArrangementTable table = parameter_table(model_, names_);
  std::map<DType, int64_t> elements;
  std::vector<std::string> left;
  for (const std::string& tensor : files().names()) {
    const checkpoint::TensorInfo& info = files().at(tensor);
    elements[info.dtype] += info.shape.elements();
    if (!table.sources.count(tensor) && !beside(tensor)) left.push_back(in_quotes(tensor));
  }
  for (const auto& [type, count] : elements)
    if (count > elements[dtype_]) dtype_ = type;
  if (left.empty()) return;
  const size_t count = left.size();
  fail(ErrorCode::unsupported, files().description() + ": " + std::to_string(count) +
                                   (count == 1 ? " tensor has" : " tensors have") +
                                   " no parameter in the model that the file describes (" + kind() +
                                   "):\n    " + join_some(left, "\n    ", 8));
}

std::unique_ptr<checkpoint::TensorSource> ExternalModel::arranged(checkpoint::TensorSource& files,
                                                                  const config::ModelConfig& model) const {
  if (model.hidden_size == model_.hidden_size && *model.padded_vocab_size < model_.vocab_size) {
    const auto shape = [&](int64_t rows) { return Shape{rows, model_.hidden_size}.text(); };
    fail(ErrorCode::failed,
         name() + " does not fit the recipe's model: `embedding.word_embeddings.weight`: " +
             shape(model_.vocab_size) + " in the checkpoint, " + shape(*model.padded_vocab_size) +
             " in the recipe",
         "model=" + name() +
             " takes the sizes from the file; model.vocab_size=" + std::to_string(model_.vocab_size));
  }
  config::ModelConfig ours = model_;
  // The recipe decides whether layers of multi-token prediction are read.
  ours.mtp_num_layers = model.mtp_num_layers;
  // Do not pad rows of another width: the model does not fit, and the message gives the real number.
  ours.padded_vocab_size =
      model.hidden_size == model_.hidden_size ? *model.padded_vocab_size : model_.vocab_size;
  const int64_t stored = prediction_layers_.count;
  std::string help;
  if (ours.mtp_num_layers.value_or(0) > stored)
    help = "the files have " + (stored == 0 ? "no layer" : counted(stored, "layer")) +
           " for multi-token prediction: set model.mtp_num_layers=" +
           (stored == 0 ? "null" : std::to_string(stored));
  return std::make_unique<RearrangedSource>(files, parameter_table(ours, names_), help);
}

namespace {

// Whether two tensors have the same type, shape and bytes.
bool same_tensor(checkpoint::TensorSource& source, const std::string& a, const std::string& b) {
  const checkpoint::TensorInfo &x = source.at(a), &y = source.at(b);
  if (x.dtype != y.dtype || x.shape != y.shape) return false;
  std::vector<std::byte> first, second;
  for (const Region& region : checkpoint::row_slabs(full_region(x.shape), x.dtype, checkpoint::kChunkBytes)) {
    first.resize(static_cast<size_t>(region.sizes.elements() * size_of(x.dtype)));
    second.resize(first.size());
    source.read(a, x.dtype, region, first);
    source.read(b, x.dtype, region, second);
    if (first != second) return false;
  }
  return true;
}

}  // namespace

PredictionLayers ExternalModel::kept_prediction_layers() {
  PredictionLayers kept = prediction_layers_;
  for (int64_t depth = 0; depth < kept.count; ++depth)
    for (const auto& [copy, original] : prediction_layer_copies(model_, names_, depth)) {
      if (!files().find(copy) || same_tensor(files(), copy, original)) continue;
      kept.left_out = counted(kept.count - depth, "layer") +
                      " for multi-token prediction left out: " + in_quotes(copy) + " differs from " +
                      in_quotes(original);
      kept.count = depth;
      return kept;
    }
  return kept;
}

std::string model_preset(const std::string& name) {
  return section_text(ExternalModel::open(name)->model());
}

std::string recipe_text(const ExternalModel& model, int64_t prediction_layers) {
  config::ModelConfig described = model.model();
  if (prediction_layers > 0) described.mtp_num_layers = prediction_layers;
  std::string text = "# Made from " + model.name() + ".\n";
  fs::path named = model.name().substr(model.name().find(':') + 1);
  if (!named.has_filename()) named = named.parent_path();
  const fs::path title =
      config::split_scheme(model.name()).scheme == "gguf:" ? named.stem() : named.filename();
  text += "name: " + config::yaml_text(title.string()) + "\nmodel:\n";
  const std::string section = section_text(described);
  for (const auto line : split(section, '\n'))
    if (!line.empty()) text += "  " + std::string(line) + "\n";
  text += std::string("mixed_precision: ") + (model.dtype() == DType::bf16 ? "bf16_mixed" : "fp32") + "\n";
  text += "train:\n  train_iters: 1\n  global_batch_size: 1\n  micro_batch_size: 1\n";
  text += "optimizer:\n  preset: adamw\n  lr: 1e-5\ndataset: mock\n";
  if (const std::string tokenizer = model.tokenizer(); tokenizer.empty())
    text += "tokenizer: none\n";
  else
    text += "tokenizer:\n  preset: huggingface\n  tokenizer_model: " + config::yaml_text(tokenizer) + "\n";
  return text;
}

config::Resolution resolve_recipe(const ExternalModel& model, config::Request request,
                                  int64_t prediction_layers) {
  // The name of the recipe in messages.
  request.recipe = model.name() + "/recipe.yaml";
  return config::resolve_text(recipe_text(model, prediction_layers), request);
}

void use_in_recipes() {
  config::read_external_models_with(model_preset);
}

}  // namespace capstan::formats

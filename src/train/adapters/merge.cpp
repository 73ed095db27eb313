#include "train/adapters/merge.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"
#include "config/core/hash.hpp"
#include "config/sections/adapter_targets.hpp"
#include "config/tools/show.hpp"
#include "formats/convert.hpp"
#include "ops/matmul.hpp"
#include "tensor/dtype.hpp"
#include "tensor/region.hpp"
#include "train/adapters/adapters.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"

namespace capstan::train {

namespace {

using checkpoint::TensorSource;

// Stores the values of a merged weight in the data type of the file.
void store_as(DType type, const std::vector<float>& values, const std::string& name,
              std::span<std::byte> to) {
  if (type == DType::f16)
    for (const float value : values)
      if (!std::isfinite(static_cast<float>(f16(value))))
        fail(ErrorCode::unsupported,
             "the merged `" + name + "` holds " + to_text(value) +
                 ", which exceeds the range of fp16, the type of the base",
             "{convert_base_to} bf16 or fp32, and merge into that");
  const Region all = full_region({static_cast<int64_t>(values.size())});
  copy_region(all, all, std::as_bytes(std::span(values)).data(), DType::f32, all, to.data(), type);
}

// Rows of a weight that have an adapter.
struct AdaptedRows {
  // "decoder.layers.0.self_attention.linear_q.adapter.".
  std::string prefix;
  config::LayerSlice rows;
};

std::vector<AdaptedRows> adapted_rows_of(const config::ModelConfig& model, const TensorSource& adapters,
                                         const std::string& weight, int64_t rows) {
  const std::string layer = weight.substr(0, weight.rfind('.'));
  std::vector<AdaptedRows> adapted;
  const auto add = [&](const config::LayerSlice& part) {
    if (adapters.find(part.path + ".adapter.linear_in.weight"))
      adapted.push_back({part.path + ".adapter.", part});
  };
  const auto parts = config::layer_slices(model, layer, rows);
  if (parts.size() > 1) add({layer, 1, 0, rows});
  for (const config::LayerSlice& part : parts) add(part);
  return adapted;
}

// One of the matrices of experts; `count` 0: the matrix of a layer without experts.
struct ExpertMatrix {
  int64_t index = 0, count = 0;

  Shape full_shape(const Shape& matrix) const {
    return count > 0 ? Shape{count, matrix[0], matrix[1]} : matrix;
  }
};

// A vector, a matrix, or the matrix of an expert. expected: its shape, where it is known.
Tensor read_matrix(Device& device, TensorSource& source, const std::string& name, const ExpertMatrix& expert,
                   const Shape& expected = {}) {
  const Shape& stored = source.at(name).shape;
  if (expected.rank() > 0 && stored != expert.full_shape(expected))
    fail(ErrorCode::format, source.description() + ": `" + name + "` is " + stored.text() +
                                ", and this base model needs " + expert.full_shape(expected).text());
  Region wanted = full_region(stored);
  Shape shape = stored;
  if (expert.count > 0) {
    wanted.offsets[0] = expert.index, wanted.sizes[0] = 1;
    shape = {stored[1], stored[2]};
  }
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  source.read(name, DType::f32, wanted, std::as_writable_bytes(std::span(values)));
  return Tensor::from_host<float>(device, shape, values);
}

// Scales each row to its magnitude (L2 norm).
void scale_rows(std::vector<float>& values, int64_t columns, const config::LayerSlice& rows,
                const std::vector<float>& magnitudes) {
  const int64_t all = static_cast<int64_t>(values.size()) / columns, width = all / rows.groups;
  for (size_t i = 0; i < magnitudes.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    const int64_t at = row / rows.count * width + rows.begin + row % rows.count;
    const std::span<float> part =
        std::span(values).subspan(static_cast<size_t>(at * columns), static_cast<size_t>(columns));
    double squared = 0;
    for (const float value : part) squared += static_cast<double>(value) * static_cast<double>(value);
    const double factor = static_cast<double>(magnitudes[i]) / std::sqrt(squared);
    for (float& value : part) value = static_cast<float>(factor * static_cast<double>(value));
  }
}

// The base matrix as training uses it: with `peft.base_quantization`, quantized to 4 bits and dequantized.
Tensor base_matrix(Device& device, TensorSource& base, const std::string& name, const ExpertMatrix& expert,
                   const StoredAdapters& adapters, bool quantized) {
  Tensor w = read_matrix(device, base, name, expert);
  if (!quantized) return w;
  ParamSpec spec;
  spec.name = name;
  spec.shape = w.shape();
  const Parameter parameter(spec, 0);
  parallel::Nf4Weight kept(device, parameter, nf4_options(adapters.peft), parallel::nf4_scale_map(device));
  kept.set(w.to_host<float>(), nullptr);
  const DType compute =
      adapters.run ? compute_type(adapters.run->resolution.config.mixed_precision) : DType::f32;
  return Tensor::from_host<float>(device, w.shape(), kept.expand(compute).to_floats());
}

// Returns w + s B A; with magnitudes (DoRA) its rows are scaled to them. Overwrites w.
std::vector<float> merged_weight(Device& device, const Tensor& w, const StoredAdapters& adapters,
                                 const std::vector<AdaptedRows>& adapted, const ExpertMatrix& expert) {
  const double scale = config::adapter_scale(adapters.peft);
  TensorSource& from = *adapters.tensors;
  for (const AdaptedRows& one : adapted) {
    const auto& [path, groups, begin, count] = one.rows;
    const int64_t rank = adapters.peft.dim;
    const Tensor a = read_matrix(device, from, one.prefix + "linear_in.weight", expert, {rank, w.size(1)});
    Tensor b = read_matrix(device, from, one.prefix + "linear_out.weight", expert, {groups * count, rank});
    auto scaled = b.to_host<float>();
    for (float& value : scaled) value = static_cast<float>(scale * static_cast<double>(value));
    b = Tensor::from_host<float>(device, b.shape(), scaled);
    const int64_t width = w.size(0) / groups;
    for (int64_t g = 0; g < groups; ++g)
      ops::matmul(ops::Transpose::no, ops::Transpose::no, b.slice(0, g * count, count), a,
                  w.slice(0, g * width + begin, count), 1);
  }
  std::vector<float> values = w.to_host<float>();
  for (const AdaptedRows& one : adapted)
    if (config::has_magnitudes(adapters.peft.scheme))
      scale_rows(values, w.size(1), one.rows,
                 read_matrix(device, from, one.prefix + "magnitude", {}, {one.rows.groups * one.rows.count})
                     .to_host<float>());
  return values;
}

// The recipe of the base, with the sequence length, EOD token and chat template of the adapters' run where
// they differ.
std::string merged_recipe(const StoredAdapters& adapters, const StoredBase& base) {
  const checkpoint::Reader* stored = base.weights.checkpoint();
  const config::Resolution& resolution = base.recipe.resolution;
  config::Request request;
  request.overrides = base.overrides;
  const auto set = [&](const std::string& path, const std::string& value) {
    request.overrides.push_back(config::Override::token(path + "=" + value));
  };
  if (adapters.run) {
    const config::Config &run = adapters.run->resolution.config, &full = resolution.config;
    if (run.model.seq_length != full.model.seq_length)
      set("model.seq_length", std::to_string(run.model.seq_length));
    if (run.model.max_position_embeddings &&
        run.model.max_position_embeddings != full.model.max_position_embeddings)
      set("model.max_position_embeddings", std::to_string(*run.model.max_position_embeddings));
    const config::TokenizerConfig &t = run.tokenizer, &before = full.tokenizer;
    if (t.eod_token != before.eod_token) set("tokenizer.eod_token", in_quotes(t.eod_token));
    if (t.chat_template && t.chat_template != before.chat_template)
      set("tokenizer.chat_template", in_quotes(t.chat_template->resolved));
  }
  if (request.overrides.empty())
    return stored ? stored->read_text(checkpoint::kRecipeFile) : config::resolved_recipe(resolution);
  if (!stored)
    return config::resolved_recipe(
        formats::resolve_recipe(*formats::ExternalModel::open(base.weights.path()), request));
  request.recipe = (stored->directory() / std::string(checkpoint::kRecipeFile)).string();
  const config::Resolution merged = config::resolve(request);
  merged.require_ok();
  return config::resolved_recipe(merged);
}

// The assets of the run, and those of the base that the run lacks.
std::map<std::string, std::string> merged_files(const std::optional<checkpoint::Reader>& run,
                                                const StoredBase& base) {
  std::map<std::string, std::string> files;
  if (const checkpoint::Reader* stored = base.weights.checkpoint()) {
    for (const auto& [file, hash] : stored->manifest().files)
      if (file != checkpoint::kStateFile && !file.ends_with(".safetensors"))
        files[file] = stored->read_text(file);
  } else {
    for (auto& [file, text] : base.weights.assets()) files[file] = std::move(text);
  }
  if (run)
    for (auto& [file, text] : assets_in(*run)) files[file] = std::move(text);
  return files;
}

checkpoint::SaveInfo merged_info(const std::optional<checkpoint::Reader>& run, const StoredBase& base) {
  const config::Config& config = base.recipe.resolution.config;
  const checkpoint::Reader* stored = base.weights.checkpoint();
  checkpoint::SaveInfo info;
  if (run)
    info = run->info();
  else if (stored)
    info = stored->info();
  else
    info.recipe_hash = config::config_hash(config::schema(), &config);
  if (!run) info.run_id = "merged", info.layout = "tp1 pp1 dp1", info.version = CAPSTAN_VERSION;
  info.parent = run ? run->directory().string() : stored ? base.weights.path() : "";
  return info;
}

// Training state of the merged checkpoint: the counters of `from`, or initial ones if `from` is null. It has
// no optimizer state, because that belongs to the adapters.
std::string merged_state(const checkpoint::Reader* from) {
  if (!from) return formats::first_state("");
  auto state = ordered_json_of(from->read_text(checkpoint::kStateFile));
  state["optimizer"] = false;
  state.erase("base");
  return dump_json(state, 2) + "\n";
}

}  // namespace

Merged merge_adapters(const StoredAdapters& adapters, StoredBase& base, const std::filesystem::path& root,
                      checkpoint::FileSystem& files) {
  require_own_base(adapters, base.weights);
  const config::Config& config = base.recipe.resolution.config;
  std::optional<checkpoint::Reader> run;
  if (adapters.run)
    run = checkpoint::Reader::open(adapters.run->checkpoint, checkpoint::Verification::structure);
  const checkpoint::SaveInfo info = merged_info(run, base);
  if (std::filesystem::exists(root / checkpoint::step_directory_name(info.step)))
    fail(ErrorCode::failed,
         "`" + (root / checkpoint::step_directory_name(info.step)).string() + "` exists already",
         "choose another directory, or remove it");
  const bool made = !std::filesystem::exists(root);
  files.make_directories(root);

  const std::unique_ptr<Device> device =
      make_device(config::DeviceKind::cpu, config.train.threads.value_or(0));
  checkpoint::Writer writer(
      files, root, info, std::to_string(std::chrono::system_clock::now().time_since_epoch().count()), 0, 1);
  const auto quantized = quantized_weights(adapters.peft, config.model);
  Merged result;
  result.prediction_layers = base.weights.prediction_layers();
  TensorSource& weights = base.weights.parameters(config.model);
  for (const std::string& name : weights.names()) {
    if (name.starts_with("optimizer.") || name.starts_with("mtp.layers.")) continue;
    const checkpoint::TensorInfo& stored = weights.at(name);
    const int rank = stored.shape.rank();
    const int64_t experts = rank == 3 ? stored.shape[0] : 0;
    const std::vector<AdaptedRows> adapted =
        rank >= 2 && name.ends_with(".weight")  // the biases of experts are matrices too
            ? adapted_rows_of(config.model, *adapters.tensors, name, stored.shape[rank - 2])
            : std::vector<AdaptedRows>{};
    if (!adapted.empty()) ++result.layers;
    const bool in_4_bits = quantized && quantized(name);
    const Region all = full_region(stored.shape);
    if (adapted.empty() && !in_4_bits) {
      writer.add(name, stored.dtype, stored.shape, all, checkpoint::source_of(weights, name, stored.dtype));
      continue;
    }
    writer.add(name, stored.dtype, stored.shape, all,
               [&, name = name, type = stored.dtype, adapted, in_4_bits, experts](const auto& sink) {
                 for (ExpertMatrix expert{0, experts}; expert.index < std::max<int64_t>(1, experts);
                      ++expert.index) {
                   const Tensor w = base_matrix(*device, weights, name, expert, adapters, in_4_bits);
                   std::vector<std::byte> bytes(static_cast<size_t>(w.elements() * size_of(type)));
                   store_as(type, merged_weight(*device, w, adapters, adapted, expert), name, bytes);
                   sink(bytes);
                 }
               });
  }
  writer.add_text(checkpoint::kStateFile, merged_state(run ? &*run : base.weights.checkpoint()));
  auto files_beside = merged_files(run, base);
  files_beside[std::string(checkpoint::kRecipeFile)] = merged_recipe(adapters, base);
  for (auto& [file, text] : files_beside) writer.add_text(file, std::move(text));
  try {
    result.checkpoint = writer.commit({writer.finish_rank()});
  } catch (...) {
    writer.abandon();
    std::error_code stays;
    // Removes the directory only if it is empty.
    if (made) std::filesystem::remove(root, stays);
    throw;
  }
  return result;
}

}  // namespace capstan::train

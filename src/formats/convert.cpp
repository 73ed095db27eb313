#include "formats/convert.hpp"

#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"
#include "config/core/hash.hpp"
#include "config/tools/show.hpp"
#include "formats/family.hpp"
#include "formats/hf_config.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "formats/new_directory.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;
using checkpoint::SafetensorsTensor;
using checkpoint::TensorInfo;
using checkpoint::TensorSource;

namespace {

// Gives the tensors of a source, converted to `dtype` unless it is nullopt or they keep their type.
class ConvertedTensors {
 public:
  ConvertedTensors(TensorSource& source, std::optional<DType> dtype) : source_(source), dtype_(dtype) {}
  DType type_of(const std::string& name) const {
    return dtype_ && !keeps_type(name) ? *dtype_ : source_.at(name).dtype;
  }
  int64_t bytes_of(const std::string& name) const {
    return source_.at(name).shape.elements() * size_of(type_of(name));
  }
  checkpoint::ByteSource bytes(const std::string& name) {
    return checkpoint::source_of(source_, name, type_of(name));
  }

 private:
  TensorSource& source_;
  std::optional<DType> dtype_;
};

const std::string* asset_file(const Assets& assets, std::string_view name) {
  for (const auto& [file, text] : assets)
    if (file == name) return &text;
  return nullptr;
}

// Orders names, comparing numbers in them by value: layers.2 before layers.10.
bool earlier(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      size_t x = i, y = j;
      while (x < a.size() && is_digit(a[x])) ++x;
      while (y < b.size() && is_digit(b[y])) ++y;
      if (x - i != y - j) return x - i < y - j;
      const int order = a.compare(i, x - i, b, j, y - j);
      if (order != 0) return order < 0;
      i = x, j = y;
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i, ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

std::string numbered_shard(size_t index, size_t count) {
  const auto padded = [](size_t value) {
    const std::string text = std::to_string(value);
    return std::string(text.size() < 5 ? 5 - text.size() : 0, '0') + text;
  };
  return "model-" + padded(index + 1) + "-of-" + padded(count) + ".safetensors";
}

// Returns the file of each tensor. Keeps the index that came with the weights if it names exactly these
// tensors and no file size is requested.
std::map<std::string, std::string> shards(const ExportSource& from, const std::vector<std::string>& names,
                                          const ConvertedTensors& converted, std::optional<int64_t> most) {
  if (const std::string* kept = most ? nullptr : asset_file(from.assets, kIndexFile)) {
    auto index = parse_index(*kept, std::string(kIndexFile));
    if (index.size() == names.size() &&
        std::all_of(names.begin(), names.end(), [&](const auto& name) { return index.count(name) > 0; }))
      return index;
  }
  std::vector<std::vector<std::string>> groups(1);
  int64_t bytes = 0;
  for (const std::string& name : names) {
    const int64_t size = converted.bytes_of(name);
    if (bytes > 0 && bytes + size > most.value_or(5'000'000'000)) groups.emplace_back(), bytes = 0;
    groups.back().push_back(name);
    bytes += size;
  }
  std::map<std::string, std::string> result;
  for (size_t i = 0; i < groups.size(); ++i)
    for (const std::string& name : groups[i])
      result[name] = groups.size() == 1 ? std::string(kSingleFile) : numbered_shard(i, groups.size());
  return result;
}

// The metadata of Transformers' index.
std::string index_text(const std::map<std::string, std::string>& shard_of, int64_t bytes, int64_t elements) {
  Json index;
  index["metadata"]["total_parameters"] = elements;
  index["metadata"]["total_size"] = bytes;
  index["weight_map"] = shard_of;
  return dump_json(index, 2) + "\n";
}

bool describes_same_shards(const std::string& kept, const std::string& made) {
  const auto a = parse_json(kept, std::string(kIndexFile)), b = json_of(made);
  const auto size = [](const Json& index) {
    return index.contains("metadata") && index["metadata"].is_object()
               ? index["metadata"].value("total_size", Json())
               : Json();
  };
  return a["weight_map"] == b["weight_map"] && size(a) == size(b);
}

// Sets the ids of special tokens from generation_config.json. Missing ids would select the class defaults of
// Transformers; null means no such token.
std::string with_special_ids(const std::string& config, const Assets& assets) {
  const std::string* settings = asset_file(assets, "generation_config.json");
  const auto generation = settings ? json_of(*settings, IfNotJson::discard) : Json();
  const auto value = [&](const char* key) {
    return generation.is_object() ? generation.value(key, Json()) : Json();
  };
  auto parsed = json_of(config);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) parsed[key] = value(key);
  // Transformers does not train the padding row of the embedding; an end-of-text token used for padding must
  // not become that row.
  const auto &eos = parsed["eos_token_id"], &pad = parsed["pad_token_id"];
  if (eos == pad || (eos.is_array() && std::find(eos.begin(), eos.end(), pad) != eos.end()))
    parsed["pad_token_id"] = nullptr;
  return dump_json(parsed, 2) + "\n";
}

struct HfClass {
  const Family* family = nullptr;
  // config.json.
  std::string config;
};

// Returns the config.json that came with the weights if it still describes the model, with the number of
// layers of multi-token prediction that the model has.
HfClass hf_class_of(const config::ModelConfig& ours, const Assets& assets, DType dtype) {
  if (const std::string* kept = asset_file(assets, kConfigFile)) {
    const HfModel model = read_hf_config(*kept, std::string(kConfigFile));
    if (differences(ours, model.model).empty())
      return {model.family,
              with_dtype(with_prediction_layers(*kept, model, ours.mtp_num_layers.value_or(0)), dtype)};
  }
  const HfConfig made = write_hf_config(ours, dtype);
  return {made.family, with_special_ids(made.text, assets)};
}

}  // namespace

TensorNames class_names(const config::ModelConfig& model, const Assets& assets) {
  // Sequence lengths and similar fields do not change the class.
  if (const std::string* kept = asset_file(assets, kConfigFile))
    return read_hf_config(*kept, std::string(kConfigFile)).family->names;
  return write_hf_config(model, DType::f32).family->names;
}

std::string first_state(const std::string& base) {
  OrderedJson state{{"schema", "capstan.state/1"}, {"step", 0},
                    {"consumed_samples", 0},       {"consumed_tokens", 0},
                    {"schedule_samples", 0},       {"optimizer_steps", 0},
                    {"optimizer", false}};
  if (!base.empty()) state["base"] = base;
  return dump_json(state, 2) + "\n";
}

WriteResult write_first_checkpoint(FirstCheckpoint from, const fs::path& to) {
  NewDirectory directory(to);
  ConvertedTensors converted(*from.tensors, from.dtype);
  checkpoint::SaveInfo info;
  info.run_id = kImportedRun;
  info.recipe_hash = config::config_hash(config::schema(), &from.resolution->config);
  info.layout = "tp1 pp1 dp1";
  info.version = CAPSTAN_VERSION;
  checkpoint::Writer writer(directory.files(), directory.path(), info, "import", 0, 1);
  WriteResult written;
  for (const std::string& name : from.tensors->names()) {
    const TensorInfo& tensor = from.tensors->at(name);
    writer.add(name, converted.type_of(name), tensor.shape, full_region(tensor.shape), converted.bytes(name));
    ++written.tensors;
    written.bytes += converted.bytes_of(name);
  }
  writer.add_text(checkpoint::kRecipeFile, config::resolved_recipe(*from.resolution));
  writer.add_text(checkpoint::kStateFile, first_state(from.base));
  for (auto& [name, text] : from.assets) {
    written.files.push_back(name);
    writer.add_text(name, std::move(text));
  }
  directory.appear(writer.commit({writer.finish_rank()}));
  return written;
}

WriteResult write_checkpoint(ExternalModel& from, const fs::path& to, std::optional<DType> dtype) {
  const PredictionLayers layers = from.kept_prediction_layers();
  const config::Resolution resolution = resolve_recipe(from, {}, layers.count);
  resolution.require_ok();
  const auto source = from.parameters(resolution.config.model);
  WriteResult written = write_first_checkpoint({&resolution, source.get(), dtype, from.assets(), ""}, to);
  written.kind = from.kind();
  written.note = layers.left_out;
  return written;
}

WriteResult write_hf(const ExportSource& from, const fs::path& to, const HfOptions& options) {
  NewDirectory directory(to);
  // Select the family first; its config.json gets the weights' type after counting.
  const HfClass hf_class = hf_class_of(from.model, from.assets, DType::f32);
  const TensorNames names =
      asset_file(from.assets, kNamesFile) ? hf_class.family->bare_names() : hf_class.family->names;
  RearrangedSource source(*from.parameters, file_table(from.model, names));
  ConvertedTensors converted(source, options.dtype);

  std::vector<std::string> tensors = source.names();
  std::sort(tensors.begin(), tensors.end(), earlier);
  WriteResult written;
  int64_t elements = 0;
  std::map<DType, int64_t> of_type;
  for (const std::string& name : tensors) {
    written.bytes += converted.bytes_of(name);
    const int64_t count = source.at(name).shape.elements();
    elements += count;
    of_type[converted.type_of(name)] += count;
  }
  written.tensors = static_cast<int64_t>(tensors.size());
  const DType most = std::max_element(of_type.begin(), of_type.end(), [](const auto& a, const auto& b) {
                       return a.second < b.second;
                     })->first;

  const auto shard_of = shards(from, tensors, converted, options.shard_bytes);
  std::map<std::string, std::vector<SafetensorsTensor>> files;
  for (const auto& [tensor, file] : shard_of)
    files[file].push_back(
        {tensor, converted.type_of(tensor), source.at(tensor).shape, converted.bytes(tensor)});
  for (const auto& [file, content] : files) {
    checkpoint::write_safetensors(directory.files(), directory.path() / file, content, {{"format", "pt"}});
    written.files.push_back(file);
  }
  const auto add = [&](const std::string& name, const std::string& text) {
    directory.write(name, text);
    written.files.push_back(name);
  };
  if (files.size() > 1 || files.begin()->first != kSingleFile) {
    const std::string made = index_text(shard_of, written.bytes, elements);
    const std::string* kept = asset_file(from.assets, kIndexFile);
    add(std::string(kIndexFile), kept && describes_same_shards(*kept, made) ? *kept : made);
  }
  add(std::string(kConfigFile), hf_class_of(from.model, from.assets, most).config);
  for (const auto& [name, text] : from.assets)
    if (name != kConfigFile && name != kIndexFile && name != kNamesFile) add(name, text);
  directory.appear(directory.path());
  written.kind = std::string(hf_class.family->model_type) + " in safetensors";
  written.tokenizer = std::any_of(from.assets.begin(), from.assets.end(),
                                  [](const auto& file) { return is_tokenizer_file(file.first); });
  return written;
}

}  // namespace capstan::formats

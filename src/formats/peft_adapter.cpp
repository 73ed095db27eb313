#include "formats/peft_adapter.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "checkpoint/safetensors.hpp"
#include "formats/config_json.hpp"
#include "formats/hf_directory.hpp"
#include "formats/new_directory.hpp"

namespace capstan::formats {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kAdapterConfig = "adapter_config.json",
                           kAdapterWeights = "adapter_model.safetensors";
constexpr std::string_view kPrefix = "base_model.model.";

// Matches PEFT's `(.*\.)?(KEY)$` from the beginning: the key is the module's full name or its end after a
// dot; with `^` only the full name.
bool matches(std::string_view module, std::string_view key) {
  if (key.starts_with("^")) return module == key.substr(1);
  return module == key || (module.size() > key.size() && module.ends_with(key) &&
                           module[module.size() - key.size() - 1] == '.');
}

template <class T>
T first_of(const std::vector<std::pair<std::string, T>>& patterns, std::string_view module, T otherwise) {
  for (const auto& [key, value] : patterns)
    if (matches(module, key)) return value;
  return otherwise;
}

// PEFT's patterns are regular expressions. Only plain names, in which a dot may be escaped, are supported.
std::string plain_key(ConfigJson& c, const char* list, std::string key) {
  if (key.ends_with("$")) key.pop_back();
  for (size_t at; (at = key.find("\\.")) != std::string::npos;) key.erase(at, 1);
  if (key.find_first_of("*+?[](){}|\\^$", key.starts_with("^") ? 1 : 0) != std::string::npos)
    c.refuse("`" + std::string(list) + "` has the regular expression " + in_quotes(key) +
             "; only names of modules are read");
  return key;
}

// The number after the last of PEFT's `.*\.PATTERN\.(\d+)\.`, of the first pattern that has one; without
// patterns the last number in the module's path.
std::optional<int64_t> layer_of(std::string_view module, const std::vector<std::string>& patterns) {
  const auto number_at = [&](size_t at) {
    const size_t end = module.find('.', at);
    return end == std::string_view::npos ? std::nullopt : parse_int(module.substr(at, end - at));
  };
  std::optional<int64_t> layer;
  for (const std::string& pattern : patterns.empty() ? std::vector<std::string>{""} : patterns) {
    const std::string before = pattern.empty() ? "." : "." + pattern + ".";
    for (size_t at = 0; (at = module.find(before, at)) != std::string_view::npos; ++at)
      if (const auto number = number_at(at + before.size())) layer = number;
    if (layer) break;
  }
  return layer;
}

}  // namespace

double PeftConfig::scale_of(std::string_view module, int64_t module_rank) const {
  const auto r = static_cast<double>(module_rank);
  return first_of(alpha_pattern, module, alpha) / (rank_stabilized ? std::sqrt(r) : r);
}

int64_t PeftConfig::rank_of(std::string_view module) const {
  return first_of(rank_pattern, module, rank);
}

bool PeftConfig::adapts(std::string_view module) const {
  const auto any = [&](const std::vector<std::string>& names) {
    return std::any_of(names.begin(), names.end(), [&](const auto& name) { return matches(module, name); });
  };
  if (any(exclude_modules)) return false;
  if (!target_pattern && !target_modules.empty() && !any(target_modules)) return false;
  if (layers_to_transform.empty()) return true;
  const std::optional<int64_t> layer = layer_of(module, layers_pattern);
  return layer && std::count(layers_to_transform.begin(), layers_to_transform.end(), *layer) > 0;
}

PeftConfig parse_peft_config(std::string_view text, const std::string& location) {
  const Json parsed = parse_json(text, location, 16);
  ConfigJson c(parsed, location);
  PeftConfig result;
  c.only("peft_type", "LORA", "only LORA is read");
  if (!c.has("peft_type")) fail(ErrorCode::format, location + ": `peft_type` is missing");
  result.base_model = c.text("base_model_name_or_path", "");
  result.task = c.text("task_type", "CAUSAL_LM");
  result.rank = c.integer("r", 8);
  result.alpha = c.number("lora_alpha", 8);
  result.dropout = c.number("lora_dropout", 0);
  if (!(result.dropout >= 0 && result.dropout < 1)) c.refuse("`lora_dropout` is not in [0, 1)");
  result.rank_stabilized = c.boolean("use_rslora", false);
  result.dora = c.boolean("use_dora", false);
  result.fan_in_fan_out = c.boolean("fan_in_fan_out", false);
  if (const Json& targets = c.value("target_modules"); targets.is_string())
    result.target_modules = {targets.get<std::string>()}, result.target_pattern = true;
  else
    result.target_modules = c.texts("target_modules");
  if (!c.value("exclude_modules").is_string()) result.exclude_modules = c.texts("exclude_modules");
  if (const Json& layers = c.value("layers_to_transform"); !layers.is_null())
    for (const Json& layer : layers.is_array() ? layers : Json::array({layers})) {
      if (!layer.is_number_integer())
        c.refuse("`layers_to_transform` is neither a number nor a list of numbers");
      else
        result.layers_to_transform.push_back(layer.get<int64_t>());
    }
  if (const Json& layers = c.value("layers_pattern"); layers.is_string())
    result.layers_pattern = {layers.get<std::string>()};
  else
    result.layers_pattern = c.texts("layers_pattern");
  std::erase(result.layers_pattern, "");
  for (std::string& name : result.layers_pattern) name = plain_key(c, "layers_pattern", name);
  // `parsed` has lost the order of the keys.
  const auto ordered = ordered_json_of(text);
  const auto pattern = [&](const char* key, auto& list, const auto& value_of) {
    const Json& entries = c.value(key);
    if (entries.is_null()) return;
    ConfigJson inner(entries, location + ": " + key);
    // `a\.b` and `a.b` are one pattern here.
    std::set<std::string> seen;
    for (const auto& [name, ignored] : ordered.at(key).items()) {
      const auto value = value_of(inner, name.c_str());
      if (std::string plain = plain_key(c, key, name); seen.insert(plain).second)
        list.emplace_back(std::move(plain), value);
    }
  };
  pattern("rank_pattern", result.rank_pattern,
          [](ConfigJson& p, const char* name) { return p.integer(name); });
  pattern("alpha_pattern", result.alpha_pattern,
          [](ConfigJson& p, const char* name) { return p.number(name); });
  c.only("bias", "none", "adapters with biases are not read");
  const Json& init = c.value("init_lora_weights");
  if (init.is_string() && init != "gaussian" && init != "orthogonal" && init != "eva")
    c.refuse("`init_lora_weights` is " + dump_json(init) + ", which changes the base's weights too");
  // Remarks, and settings of the finished training.
  c.changes_nothing({"auto_mapping", "eva_config", "inference_mode", "megatron_core", "peft_version",
                     "qalora_group_size", "revision", "runtime_config", "ensure_weight_tying",
                     "corda_config"});
  c.finish();
  return result;
}

std::string peft_config_text(const PeftConfig& config) {
  const OrderedJson none = OrderedJson::object();
  OrderedJson j = {{"alpha_pattern", none},
                   {"auto_mapping", nullptr},
                   {"base_model_name_or_path", config.base_model},
                   {"bias", "none"},
                   {"exclude_modules", nullptr},
                   {"fan_in_fan_out", config.fan_in_fan_out},
                   {"inference_mode", true},
                   {"init_lora_weights", true},
                   {"layer_replication", nullptr},
                   {"layers_pattern", nullptr},
                   {"layers_to_transform", nullptr},
                   {"loftq_config", none},
                   {"lora_alpha", config.alpha},
                   {"lora_bias", false},
                   {"lora_dropout", config.dropout},
                   {"megatron_config", nullptr},
                   {"megatron_core", "megatron.core"},
                   {"modules_to_save", nullptr},
                   {"peft_type", "LORA"},
                   {"r", config.rank},
                   {"rank_pattern", none},
                   {"revision", nullptr},
                   {"target_modules", config.target_modules},
                   {"task_type", config.task},
                   {"use_dora", config.dora},
                   {"use_rslora", config.rank_stabilized}};
  if (config.alpha == std::round(config.alpha) && std::abs(config.alpha) < 1e15)
    j["lora_alpha"] = static_cast<int64_t>(config.alpha);
  for (const auto& [key, value] : config.rank_pattern) j["rank_pattern"][key] = value;
  for (const auto& [key, value] : config.alpha_pattern) j["alpha_pattern"][key] = value;
  return dump_json(j, 2) + "\n";
}

bool is_peft(const fs::path& directory) {
  std::error_code error;
  return fs::exists(directory / kAdapterConfig, error);
}

PeftAdapter read_peft(const fs::path& directory) {
  std::error_code error;
  if (!fs::exists(directory, error))
    fail_not_found("adapter", directory.string(),
                   "a directory of PEFT's holds adapter_config.json and adapter_model.safetensors");
  if (!fs::is_directory(directory, error))
    fail(ErrorCode::not_found, "`" + directory.string() + "` is not a directory with an adapter",
         "a directory of PEFT's holds adapter_config.json and adapter_model.safetensors");
  for (const char* pickle : {"adapter_model.bin", "adapter_model.pt", "adapter_model.pth"})
    if (!fs::exists(directory / kAdapterWeights, error) && fs::exists(directory / pickle, error))
      fail(ErrorCode::unsupported,
           "`" + (directory / pickle).string() + "` is a pickle, which is a program: none is ever run",
           "where its origin is trusted, load it with PEFT and save it again: safetensors is its default");
  if (!is_peft(directory))
    fail(ErrorCode::not_found,
         "`" + directory.string() + "` holds no adapter: there is no adapter_config.json",
         fs::exists(directory / kConfigFile, error)
             ? "it has a config.json, as a full model has: hf:" + directory.string()
             : "a directory of PEFT's holds adapter_config.json and adapter_model.safetensors");
  PeftAdapter adapter;
  const fs::path config = file_inside(directory, std::string(kAdapterConfig));
  adapter.config = parse_peft_config(read_file(config, 16 << 20), config.string());
  const checkpoint::SafetensorsFile file(file_inside(directory, std::string(kAdapterWeights)));

  std::map<std::string, AdapterModule> modules;
  std::set<std::string> has_a, has_b;
  std::vector<std::string> left;
  for (const auto& entry : file.entries()) {
    std::string_view name = entry.name;
    const auto part = [&](std::string_view suffix) {
      if (!name.starts_with(kPrefix) || !name.ends_with(suffix)) return false;
      name = name.substr(kPrefix.size(), name.size() - kPrefix.size() - suffix.size());
      return true;
    };
    const bool a = part(".lora_A.weight"), b = !a && part(".lora_B.weight");
    const bool magnitude =
        !a && !b && (part(".lora_magnitude_vector") || part(".lora_magnitude_vector.weight"));
    if (!a && !b && !magnitude) {
      left.push_back(in_quotes(entry.name));
      continue;
    }
    const auto wrong = [&](const std::string& what) {
      fail(ErrorCode::format, "`" + file.path().string() + "`: the tensor " + in_quotes(entry.name) + " is " +
                                  entry.dtype_name + " " + entry.shape.text() + ", " + what);
    };
    if (entry.shape.size() != (magnitude ? 1 : 2) || entry.shape.elements() == 0)
      wrong(magnitude ? "and should be a vector" : "and should be a matrix");
    if (!entry.dtype || !can_convert(*entry.dtype, DType::f32)) wrong("which is not read");
    AdapterModule& module = modules[std::string(name)];
    module.module = name;
    const auto agree = [&](int64_t& known, int64_t value, const char* what) {
      if (known != 0 && known != value)
        wrong(std::string("and another tensor of the module has a different ") + what);
      known = value;
    };
    std::vector<float>& values = a ? module.a : b ? module.b : module.magnitude;
    if (a)
      agree(module.rank, entry.shape[0], "rank"), module.in = entry.shape[1], has_a.insert(module.module);
    if (b)
      agree(module.rank, entry.shape[1], "rank"), agree(module.out, entry.shape[0], "width"),
          has_b.insert(module.module);
    if (magnitude) agree(module.out, entry.shape[0], "width");
    values.resize(static_cast<size_t>(entry.shape.elements()));
    const auto box = full_region(entry.shape);
    file.copy_region(entry, box, box, box, reinterpret_cast<std::byte*>(values.data()), DType::f32);
  }
  if (!left.empty())
    fail(ErrorCode::unsupported, "`" + file.path().string() +
                                     "`: only LoRA of linear layers is read, and there are " +
                                     join_some(left, ", ", 6));
  std::vector<std::string> unmatched;
  for (const auto& [name, module] : modules)
    if (!adapter.config.adapts(name)) unmatched.push_back(in_quotes(name));
  if (!unmatched.empty())
    fail(ErrorCode::format,
         "`" + file.path().string() + "` has weights for " + std::to_string(unmatched.size()) +
             " modules that `" + config.string() + "` does not adapt: " + join_some(unmatched, ", ", 6),
         "PEFT leaves them out: correct target_modules, exclude_modules or layers_to_transform there");
  for (auto& [name, module] : modules) {
    if (!has_a.count(name) || !has_b.count(name) || module.magnitude.empty() == adapter.config.dora)
      fail(ErrorCode::format,
           "`" + file.path().string() + "`: the module `" + name + "` lacks " +
               (!has_a.count(name)   ? "lora_A"
                : !has_b.count(name) ? "lora_B"
                                     : "or has a lora_magnitude_vector against `use_dora`"));
    if (const int64_t rank = adapter.config.rank_of(name); module.rank != rank)
      fail(ErrorCode::format, "`" + file.path().string() + "`: the module `" + name + "` has the rank " +
                                  std::to_string(module.rank) + ", and `" + config.string() + "` gives it " +
                                  std::to_string(rank));
    module.scale = adapter.config.scale_of(name, module.rank);
    adapter.modules.push_back(std::move(module));
  }
  if (adapter.modules.empty()) fail(ErrorCode::format, "`" + file.path().string() + "` holds no adapter");
  return adapter;
}

void write_peft(const fs::path& directory, const PeftAdapter& adapter, const Assets& assets) {
  NewDirectory made(directory);
  for (const AdapterModule& module : adapter.modules) {
    const double expected = adapter.config.scale_of(module.module, module.rank);
    CAPSTAN_ASSERT(std::abs(module.scale - expected) <= 1e-9 * std::abs(expected),
                   "the scale of " + module.module + " is not its configuration's");
  }
  std::vector<checkpoint::SafetensorsTensor> tensors;
  const auto add = [&](const std::string& name, Shape shape, const std::vector<float>& values) {
    tensors.push_back({std::string(kPrefix) + name, DType::f32, shape,
                       checkpoint::source_of(std::as_bytes(std::span(values)))});
  };
  for (const AdapterModule& module : adapter.modules) {
    add(module.module + ".lora_A.weight", {module.rank, module.in}, module.a);
    add(module.module + ".lora_B.weight", {module.out, module.rank}, module.b);
    if (!module.magnitude.empty())
      add(module.module + ".lora_magnitude_vector", {module.out}, module.magnitude);
  }
  checkpoint::write_safetensors(made.files(), made.path() / kAdapterWeights, tensors, {{"format", "pt"}});
  made.write(std::string(kAdapterConfig), peft_config_text(adapter.config));
  for (const auto& [name, text] : assets) made.write(name, text);
  made.appear(made.path());
}

}  // namespace capstan::formats

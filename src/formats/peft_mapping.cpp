#include "formats/peft_mapping.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/sections/adapter_targets.hpp"

namespace capstan::formats {

using config::ModelConfig;

namespace {

constexpr std::string_view kWeight = ".weight";

std::string module_of(std::string_view tensor) {
  return std::string(tensor.substr(0, tensor.size() - kWeight.size()));
}

const AdapterModule* find(const std::vector<AdapterModule>& modules, std::string_view name) {
  const auto found =
      std::find_if(modules.begin(), modules.end(), [&](const auto& m) { return m.module == name; });
  return found == modules.end() ? nullptr : &*found;
}

// The modules of the file's model that form a layer, in the order of their first rows.
std::vector<std::string> parts_of(const Arrangement& arrangement) {
  std::vector<std::string> parts;
  for (const Segment& segment : arrangement.segments)
    if (const std::string part = module_of(segment.source);
        std::find(parts.begin(), parts.end(), part) == parts.end())
      parts.push_back(part);
  return parts;
}

// The rows of a slice, one group after the other.
Arrangement rows_of(const Arrangement& full, const config::LayerSlice& part) {
  const auto& [path, groups, begin, count] = part;
  Arrangement result = full;
  result.segments.clear();
  const int64_t width = full.shape[0] / groups;
  result.shape[0] = groups * count;
  for (int64_t g = 0; g < groups; ++g)
    for (const Segment& segment : full.segments) {
      const int64_t first = std::max(segment.begin, g * width + begin),
                    end = std::min(segment.begin + segment.count, g * width + begin + count);
      if (first < end)
        result.segments.push_back({segment.source, first - (g * width + begin) + g * count,
                                   segment.source_begin + first - segment.begin, end - first});
    }
  return result;
}

// The weights that can have adapters, as the layers of the scheme; the file's modules with their [out, in].
struct Layers {
  std::map<std::string, Arrangement> ours;
  struct Size {
    int64_t out = 0, in = 0;
  };
  std::map<std::string, Size> theirs;
};

Layers layers_of(const ModelConfig& m, const TensorNames& names, bool parts) {
  const ArrangementTable table = parameter_table(m, names);
  Layers result;
  for (const auto& [name, arrangement] : table.targets) {
    if (!name.ends_with(kWeight) || name.find(".linear_") == std::string::npos) continue;
    const std::string path = module_of(name);
    for (const std::string& part : parts_of(arrangement)) {
      const Shape& shape = table.sources.at(part + std::string(kWeight));
      result.theirs[part] = {shape[arrangement.source_dimension], shape[1 - arrangement.source_dimension]};
    }
    if (!parts)
      result.ours[path] = arrangement;
    else
      for (const config::LayerSlice& part : config::layer_slices(m, path, arrangement.shape[0]))
        result.ours[part.path] = rows_of(arrangement, part);
  }
  return result;
}

void fail_with(ErrorCode code, const std::string& location, const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  const size_t count = problems.size();
  fail(code,
       location + " does not fit the model: " + counted(count, "difference") + "\n    " +
           join_some(problems, "\n    ", 8),
       "adapters fit only their base model");
}

std::string size_text(int64_t out, int64_t in) {
  return std::to_string(in) + " inputs and " + std::to_string(out) + " outputs";
}

void check_modules(const PeftAdapter& adapter, const Layers& layers, const std::string& location) {
  std::vector<std::string> known, problems;
  for (const auto& [name, size] : layers.theirs) known.push_back(name);
  for (const AdapterModule& module : adapter.modules) {
    const auto found = layers.theirs.find(module.module);
    if (found == layers.theirs.end()) {
      const auto near = near_matches(module.module, known, 1);
      problems.push_back("the model has no linear layer `" + module.module + "`" +
                         (near.empty() ? "" : "; near: `" + near[0] + "`"));
    } else if (module.in != found->second.in || module.out != found->second.out) {
      problems.push_back("`" + module.module + "` is for a layer of " + size_text(module.out, module.in) +
                         "; the model's has " + size_text(found->second.out, found->second.in));
    } else if (module.rank > std::max(module.in, module.out)) {
      // Adapters of smaller rank may be padded to the largest one, so its rank is limited.
      problems.push_back("`" + module.module + "` has the rank " + std::to_string(module.rank) +
                         ", more than the layer has inputs and outputs");
    }
  }
  fail_with(ErrorCode::format, location, problems);
}

bool alike(const AdapterModule& a, const AdapterModule& b) {
  return a.rank == b.rank && a.scale == b.scale && a.a == b.a;
}

// Returns true if every layer has adapters with the same A in all of its slices, or in none.
bool fusable(const PeftAdapter& adapter, const Layers& layers) {
  for (const auto& [path, arrangement] : layers.ours) {
    const auto parts = parts_of(arrangement);
    const AdapterModule* first = find(adapter.modules, parts[0]);
    for (const std::string& part : parts) {
      const AdapterModule* module = find(adapter.modules, part);
      if ((module == nullptr) != (first == nullptr) || (module && !alike(*module, *first))) return false;
    }
  }
  return true;
}

// Returns names that match exactly these paths: the last component of a path if all paths with that component
// are selected.
std::vector<std::string> shortest(const std::vector<std::string>& paths,
                                  const std::vector<std::string>& all) {
  const std::set<std::string> wanted(paths.begin(), paths.end());
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    const std::string last_part = path.substr(path.rfind('.') + 1);
    const bool all_wanted = std::all_of(all.begin(), all.end(), [&](const std::string& other) {
      return other.substr(other.rfind('.') + 1) != last_part || wanted.count(other) > 0;
    });
    const std::string& name = all_wanted ? last_part : path;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

}  // namespace

AdapterSet to_capstan(const PeftAdapter& adapter, const ModelConfig& model, const TensorNames& names,
                      std::optional<bool> parts, const std::string& location) {
  Layers layers = layers_of(model, names, false);
  check_modules(adapter, layers, location);
  const bool apart = parts.value_or(false) || !fusable(adapter, layers);
  if (apart) layers = layers_of(model, names, true);

  AdapterSet result;
  config::PeftConfig& peft = result.peft;
  peft.scheme = adapter.config.dora ? (apart ? config::PeftScheme::canonical_dora : config::PeftScheme::dora)
                                    : (apart ? config::PeftScheme::canonical_lora : config::PeftScheme::lora);
  peft.use_rslora = adapter.config.rank_stabilized;
  peft.dropout = adapter.config.dropout;
  peft.dim = 0;
  for (const AdapterModule& module : adapter.modules) peft.dim = std::max(peft.dim, module.rank);
  const AdapterModule& first = adapter.modules[0];
  const bool one_scale = std::all_of(adapter.modules.begin(), adapter.modules.end(),
                                     [&](const AdapterModule& m) { return m.scale == first.scale; });
  peft.alpha = adapter.config.alpha;
  if (const auto r = static_cast<double>(peft.dim); one_scale && config::adapter_scale(peft) != first.scale)
    peft.alpha = first.scale * (peft.use_rslora ? std::sqrt(r) : r);
  const double scale = config::adapter_scale(peft);

  std::vector<std::string> paths;
  const auto all = config::adaptable_layers(model, peft.scheme);
  for (const std::string& path : all) {
    const Arrangement& arrangement = layers.ours.at(path);
    const AdapterModule* source = nullptr;
    for (const std::string& part : parts_of(arrangement))
      if (!source) source = find(adapter.modules, part);
    if (!source) continue;
    AdapterModule ours;
    ours.module = path;
    ours.rank = peft.dim;
    ours.scale = scale;
    ours.out = arrangement.shape[0];
    ours.in = arrangement.shape[1];
    ours.a = source->a;
    ours.a.resize(static_cast<size_t>(ours.rank * ours.in));
    ours.b.resize(static_cast<size_t>(ours.out * ours.rank));
    if (adapter.config.dora) ours.magnitude.resize(static_cast<size_t>(ours.out));
    for (const Segment& segment : arrangement.segments) {
      const AdapterModule& part = *find(adapter.modules, module_of(segment.source));
      const double ratio = one_scale ? 1 : part.scale / scale;
      for (int64_t row = 0; row < segment.count; ++row) {
        const float* from = part.b.data() + (segment.source_begin + row) * part.rank;
        float* to = ours.b.data() + (segment.begin + row) * ours.rank;
        for (int64_t i = 0; i < part.rank; ++i)
          to[i] = static_cast<float>(ratio * static_cast<double>(from[i]));
        if (adapter.config.dora)
          ours.magnitude[static_cast<size_t>(segment.begin + row)] =
              part.magnitude[static_cast<size_t>(segment.source_begin + row)];
      }
    }
    paths.push_back(path);
    result.modules.push_back(std::move(ours));
  }
  peft.target_modules = shortest(paths, all);
  return result;
}

namespace {

// Capstan's adapters of one PEFT module, with the rows that each covers.
struct ModuleSlice {
  const AdapterModule* module;
  std::vector<Segment> segments;
};

// Stacks their A's if they differ.
AdapterModule stacked(const std::string& name, Layers::Size size, const std::vector<ModuleSlice>& slices) {
  const bool one = std::all_of(slices.begin(), slices.end(),
                               [&](const ModuleSlice& b) { return b.module->a == slices[0].module->a; });
  const int64_t rank = slices[0].module->rank;
  AdapterModule result;
  result.module = name;
  result.out = size.out;
  result.in = size.in;
  result.scale = slices[0].module->scale;
  result.rank = one ? rank : rank * static_cast<int64_t>(slices.size());
  result.b.resize(static_cast<size_t>(result.out * result.rank));
  int64_t covered = 0, first = 0;
  for (const ModuleSlice& part : slices) {
    const AdapterModule& from = *part.module;
    if (!one || first == 0) result.a.insert(result.a.end(), from.a.begin(), from.a.end());
    if (!from.magnitude.empty()) result.magnitude.resize(static_cast<size_t>(result.out));
    for (const Segment& segment : part.segments) {
      covered += segment.count;
      for (int64_t row = 0; row < segment.count; ++row) {
        const int64_t to = segment.source_begin + row;
        std::copy_n(from.b.data() + (segment.begin + row) * rank, rank,
                    result.b.data() + to * result.rank + (one ? 0 : first));
        if (!from.magnitude.empty())
          result.magnitude[static_cast<size_t>(to)] =
              from.magnitude[static_cast<size_t>(segment.begin + row)];
      }
    }
    first += rank;
  }
  if (!result.magnitude.empty() && covered != result.out)
    fail(ErrorCode::unsupported,
         "the adapters have magnitudes (DoRA) for a part of `" + name +
             "`, which is one module in PEFT, with magnitudes for all of its rows",
         "{merge_adapters}");
  return result;
}

}  // namespace

PeftAdapter to_peft(const AdapterSet& adapters, const ModelConfig& model, const TensorNames& names,
                    const std::string& base) {
  const config::PeftConfig& peft = adapters.peft;
  const Layers layers = layers_of(model, names, config::adapts_parts(peft.scheme));
  std::map<std::string, std::vector<ModuleSlice>> slices;
  std::vector<std::string> problems;
  for (const auto& [path, arrangement] : layers.ours) {
    const AdapterModule* module = find(adapters.modules, path);
    if (!module) continue;
    if (module->in != arrangement.shape[1] || module->out != arrangement.shape[0]) {
      problems.push_back("`" + path + "` is for a layer of " + size_text(module->out, module->in) +
                         "; the model's has " + size_text(arrangement.shape[0], arrangement.shape[1]));
      continue;
    }
    std::map<std::string, std::vector<Segment>> segments;
    for (const Segment& segment : arrangement.segments)
      segments[module_of(segment.source)].push_back(segment);
    for (auto& [part, of_part] : segments) slices[part].push_back({module, std::move(of_part)});
  }
  fail_with(ErrorCode::format, "the adapter", problems);
  PeftAdapter result;
  PeftConfig& c = result.config;
  c.base_model = base;
  c.rank = peft.dim;
  c.alpha = peft.alpha;
  c.dropout = peft.dropout;
  c.rank_stabilized = peft.use_rslora;
  c.dora = config::has_magnitudes(peft.scheme);
  c.fan_in_fan_out = names.transposed;
  std::vector<std::string> paths, all;
  for (const auto& [name, size] : layers.theirs) all.push_back(name);
  for (const auto& [name, parts] : slices) {
    paths.push_back(name);
    result.modules.push_back(stacked(name, layers.theirs.at(name), parts));
    const AdapterModule& made = result.modules.back();
    if (made.rank == peft.dim) continue;
    const auto r = static_cast<double>(made.rank);
    c.rank_pattern.emplace_back(name, made.rank);
    c.alpha_pattern.emplace_back(name, made.scale * (peft.use_rslora ? std::sqrt(r) : r));
  }
  c.target_modules = shortest(paths, all);
  std::sort(c.target_modules.begin(), c.target_modules.end());
  return result;
}

namespace {

struct InMemoryTensor : checkpoint::TensorInfo {
  const std::vector<float>* values = nullptr;
};

class AdapterTensors final : public checkpoint::MapSource<InMemoryTensor> {
 public:
  AdapterTensors(std::vector<AdapterModule> modules, std::string location)
      : modules_(std::move(modules)), location_(std::move(location)) {
    for (const AdapterModule& m : modules_) {
      const std::string around = m.module + ".adapter.";
      add(around + "linear_in.weight", {m.rank, m.in}, m.a);
      add(around + "linear_out.weight", {m.out, m.rank}, m.b);
      if (!m.magnitude.empty()) add(around + "magnitude", {m.out}, m.magnitude);
    }
  }
  std::string description() const override { return location_; }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override {
    const InMemoryTensor& tensor = entry(name);
    if (!fits(wanted, tensor.shape))
      fail(ErrorCode::failed, location_ + ": `" + std::string(name) + "` " + tensor.shape.text() +
                                  " has no region " + wanted.text());
    copy_region(wanted, full_region(tensor.shape), reinterpret_cast<const std::byte*>(tensor.values->data()),
                DType::f32, wanted, out.data(), dtype);
  }

 private:
  void add(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    tensors_[name] = {{DType::f32, shape}, &values};
  }
  std::vector<AdapterModule> modules_;
  std::string location_;
};

}  // namespace

std::unique_ptr<checkpoint::TensorSource> adapter_tensors(std::vector<AdapterModule> modules,
                                                          std::string location) {
  return std::make_unique<AdapterTensors>(std::move(modules), std::move(location));
}

AdapterSet read_adapters(checkpoint::TensorSource& tensors, const config::PeftConfig& peft,
                         const ModelConfig& model) {
  AdapterSet result{peft, {}};
  std::vector<std::string> problems;
  const auto read = [&](const std::string& name, size_t dimensions) {
    std::vector<float> values;
    const checkpoint::TensorInfo* info = tensors.find(name);
    if (!info || info->shape.size() != dimensions) {
      problems.push_back("`" + name + "` " + (info ? "is " + info->shape.text() : "is missing"));
      return values;
    }
    values.resize(static_cast<size_t>(info->shape.elements()));
    tensors.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
    return values;
  };
  for (const std::string& path : config::adaptable_layers(model, peft.scheme)) {
    if (!config::adapts(peft, path)) continue;
    AdapterModule m;
    m.module = path;
    m.scale = config::adapter_scale(peft);
    m.a = read(path + ".adapter.linear_in.weight", 2);
    m.b = read(path + ".adapter.linear_out.weight", 2);
    if (config::has_magnitudes(peft.scheme)) m.magnitude = read(path + ".adapter.magnitude", 1);
    if (m.a.empty() || m.b.empty()) continue;
    m.rank = tensors.at(path + ".adapter.linear_in.weight").shape[0];
    m.in = tensors.at(path + ".adapter.linear_in.weight").shape[1];
    m.out = tensors.at(path + ".adapter.linear_out.weight").shape[0];
    if (m.rank != peft.dim || static_cast<int64_t>(m.b.size()) != m.out * m.rank)
      problems.push_back("`" + path + "` has adapters of another rank than peft.dim " +
                         std::to_string(peft.dim));
    result.modules.push_back(std::move(m));
  }
  fail_with(ErrorCode::format, tensors.description(), problems);
  return result;
}

}  // namespace capstan::formats

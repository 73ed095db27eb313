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

// Finds modules by name, and those of experts by their index.
class ModuleIndex {
 public:
  explicit ModuleIndex(const std::vector<AdapterModule>& modules) {
    for (const AdapterModule& m : modules)
      by_name_.emplace(std::pair(std::string_view(m.module), m.expert), &m);
  }
  // Null: there is none.
  const AdapterModule* find(std::string_view name, int64_t expert = 0) const {
    const auto found = by_name_.find({name, expert});
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  std::map<std::pair<std::string_view, int64_t>, const AdapterModule*> by_name_;
};

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

// The matrices of a layer's weight: of a layer of experts one for each, else the weight itself.
std::vector<Arrangement> matrices_of(const Arrangement& full) {
  if (full.shape.rank() < 3) return {full};
  const int64_t rows = full.shape[1];
  std::vector<Arrangement> matrices(static_cast<size_t>(full.shape[0]));
  for (Arrangement& matrix : matrices)
    matrix = {{rows, full.shape[2]}, full.dimension, full.source_dimension, {}, full.add};
  for (Segment segment : full.segments) {
    Arrangement& matrix = matrices[static_cast<size_t>(segment.begin / rows)];
    segment.begin %= rows;
    matrix.segments.push_back(std::move(segment));
  }
  return matrices;
}

// The weights that can have adapters, as the layers of the scheme; the file's modules with their [out, in].
struct Layers {
  // Of each layer the matrices_of() its weight.
  std::map<std::string, std::vector<Arrangement>> ours;
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
    // A tensor of all experts is no module.
    if (table.sources.at(arrangement.segments.front().source).rank() == 3) continue;
    const std::string path = module_of(name);
    for (const std::string& part : parts_of(arrangement)) {
      const Shape& shape = table.sources.at(part + std::string(kWeight));
      result.theirs[part] = {shape[arrangement.source_dimension], shape[1 - arrangement.source_dimension]};
    }
    for (Arrangement& matrix : matrices_of(arrangement))
      if (!parts)
        result.ours[path].push_back(std::move(matrix));
      else
        for (const config::LayerSlice& part : config::layer_slices(m, path, matrix.shape[0]))
          result.ours[part.path].push_back(rows_of(matrix, part));
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
bool fusable(const ModuleIndex& modules, const Layers& layers) {
  for (const auto& [path, matrices] : layers.ours)
    for (const Arrangement& matrix : matrices) {
      const auto parts = parts_of(matrix);
      const AdapterModule* first = modules.find(parts[0]);
      for (const std::string& part : parts) {
        const AdapterModule* module = modules.find(part);
        if ((module == nullptr) != (first == nullptr) || (module && !alike(*module, *first))) return false;
      }
    }
  return true;
}

// Returns names that match exactly these paths: the last component of a path if all paths with that component
// are selected.
std::vector<std::string> shortest(const std::vector<std::string>& paths,
                                  const std::vector<std::string>& all) {
  const auto last_part = [](const std::string& path) { return path.substr(path.rfind('.') + 1); };
  std::map<std::string, int64_t> not_selected;
  for (const std::string& path : all) ++not_selected[last_part(path)];
  for (const std::string& path : paths) --not_selected[last_part(path)];
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const std::string& path : paths) {
    std::string last = last_part(path);
    const std::string& name = not_selected[last] == 0 ? last : path;
    if (seen.insert(name).second) names.push_back(name);
  }
  return names;
}

}  // namespace

AdapterSet to_capstan(const PeftAdapter& adapter, const ModelConfig& model, const TensorNames& names,
                      std::optional<bool> parts, const std::string& location) {
  Layers layers = layers_of(model, names, false);
  check_modules(adapter, layers, location);
  const ModuleIndex modules(adapter.modules);
  const bool apart = parts.value_or(false) || !fusable(modules, layers);
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
  std::set<std::string_view> used;
  for (const std::string& path : all) {
    const auto found = layers.ours.find(path);
    if (found == layers.ours.end()) continue;
    const std::vector<Arrangement>& matrices = found->second;
    const size_t before = result.modules.size();
    for (size_t expert = 0; expert < matrices.size(); ++expert) {
      const Arrangement& matrix = matrices[expert];
      const AdapterModule* source = nullptr;
      for (const std::string& part : parts_of(matrix))
        if (!source) source = modules.find(part);
      if (!source) continue;
      AdapterModule ours;
      ours.module = path;
      if (config::is_layer_of_experts(path))
        ours.expert = static_cast<int64_t>(expert), ours.experts = std::ssize(matrices);
      ours.rank = peft.dim;
      ours.scale = scale;
      ours.out = matrix.shape[0];
      ours.in = matrix.shape[1];
      ours.a = source->a;
      ours.a.resize(static_cast<size_t>(ours.rank * ours.in));
      ours.b.resize(static_cast<size_t>(ours.out * ours.rank));
      if (adapter.config.dora) ours.magnitude.resize(static_cast<size_t>(ours.out));
      for (const Segment& segment : matrix.segments) {
        const AdapterModule& part = *modules.find(module_of(segment.source));
        used.insert(part.module);
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
      result.modules.push_back(std::move(ours));
    }
    const size_t adapted = result.modules.size() - before;
    if (adapted == 0) continue;
    if (adapted != matrices.size())
      fail(ErrorCode::unsupported, location + " has adapters of " + std::to_string(adapted) + " of the " +
                                       std::to_string(matrices.size()) + " experts of `" + path +
                                       "`; here all of them have one, or none");
    paths.push_back(path);
  }
  for (const AdapterModule& module : adapter.modules)
    if (!used.count(module.module))
      fail(ErrorCode::unsupported, location + " has magnitudes (DoRA) for the expert `" + module.module +
                                       "`; experts have adapters without them");
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
  const ModuleIndex modules(adapters.modules);
  for (const AdapterModule& module : adapters.modules)
    if (!layers.ours.count(module.module))
      fail(ErrorCode::unsupported,
           "`" + module.module +
               "` is in one tensor of all experts in the model's class, for which PEFT has no "
               "adapter of this form",
           "{merge_adapters}");
  std::map<std::string, std::vector<ModuleSlice>> slices;
  std::vector<std::string> problems;
  const auto add = [&](const std::string& path, const Arrangement& matrix, int64_t expert) {
    const AdapterModule* module = modules.find(path, expert);
    if (!module) return;
    if (module->in != matrix.shape[1] || module->out != matrix.shape[0]) {
      problems.push_back("`" + path + "` is for a layer of " + size_text(module->out, module->in) +
                         "; the model's has " + size_text(matrix.shape[0], matrix.shape[1]));
      return;
    }
    std::map<std::string, std::vector<Segment>> segments;
    for (const Segment& segment : matrix.segments) segments[module_of(segment.source)].push_back(segment);
    for (auto& [part, of_part] : segments) slices[part].push_back({module, std::move(of_part)});
  };
  for (const auto& [path, matrices] : layers.ours)
    for (int64_t expert = 0; expert < std::ssize(matrices); ++expert)
      add(path, matrices[static_cast<size_t>(expert)], expert);
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
  std::vector<float> values;
};

class AdapterTensors final : public checkpoint::MapSource<InMemoryTensor> {
 public:
  // The modules of a layer's experts follow one another.
  AdapterTensors(std::vector<AdapterModule> modules, std::string location) : location_(std::move(location)) {
    for (AdapterModule& m : modules) {
      const std::string around = m.module + ".adapter.";
      add(around + "linear_in.weight", {m.rank, m.in}, m.experts, std::move(m.a));
      add(around + "linear_out.weight", {m.out, m.rank}, m.experts, std::move(m.b));
      if (!m.magnitude.empty()) add(around + "magnitude", {m.out}, 0, std::move(m.magnitude));
    }
  }
  std::string description() const override { return location_; }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override {
    const InMemoryTensor& tensor = entry(name);
    if (!fits(wanted, tensor.shape))
      fail(ErrorCode::failed, location_ + ": `" + std::string(name) + "` " + tensor.shape.text() +
                                  " has no region " + wanted.text());
    copy_region(wanted, full_region(tensor.shape), reinterpret_cast<const std::byte*>(tensor.values.data()),
                DType::f32, wanted, out.data(), dtype);
  }

 private:
  void add(const std::string& name, const Shape& shape, int64_t experts, std::vector<float> values) {
    InMemoryTensor& tensor = tensors_[name];
    tensor.dtype = DType::f32;
    tensor.shape = experts > 0 ? Shape{experts, shape[0], shape[1]} : shape;
    tensor.values.insert(tensor.values.end(), values.begin(), values.end());
  }
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
    const bool of_experts = config::is_layer_of_experts(path);
    const std::string in_name = path + ".adapter.linear_in.weight",
                      out_name = path + ".adapter.linear_out.weight";
    const std::vector<float> a = read(in_name, of_experts ? 3 : 2), b = read(out_name, of_experts ? 3 : 2);
    AdapterModule m;
    m.module = path;
    m.scale = config::adapter_scale(peft);
    if (config::has_magnitudes(peft.scheme)) m.magnitude = read(path + ".adapter.magnitude", 1);
    if (a.empty() || b.empty()) continue;
    const Shape &first = tensors.at(in_name).shape, &second = tensors.at(out_name).shape;
    const int64_t matrices = of_experts ? *model.num_moe_experts : 1;
    m.rank = first[first.rank() - 2];
    m.in = first[first.rank() - 1];
    m.out = second[second.rank() - 2];
    m.experts = of_experts ? matrices : 0;
    if (of_experts && (first[0] != matrices || second[0] != matrices)) {
      problems.push_back("`" + path + "` has adapters of " + std::to_string(first[0]) + " and " +
                         std::to_string(second[0]) + " experts instead of " + std::to_string(matrices));
      continue;
    }
    if (m.rank != peft.dim || second[second.rank() - 1] != m.rank) {
      problems.push_back("`" + path + "` has adapters of another rank than peft.dim " +
                         std::to_string(peft.dim));
      continue;
    }
    const auto of_expert = [&](const std::vector<float>& all) {
      const auto count = std::ssize(all) / matrices, begin = m.expert * count;
      return std::vector<float>(all.begin() + begin, all.begin() + begin + count);
    };
    for (m.expert = 0; m.expert < matrices; ++m.expert) {
      m.a = of_expert(a);
      m.b = of_expert(b);
      result.modules.push_back(m);
    }
  }
  fail_with(ErrorCode::format, tensors.description(), problems);
  return result;
}

}  // namespace capstan::formats

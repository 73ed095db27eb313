#include "importers/finetuning.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "base/text.hpp"
#include "importers/reasons.hpp"

namespace capstan::importers {

using config::Node;

namespace {

// A module of Transformers in Capstan: the slice that has its own adapter, and the fused layer that contains
// it.
struct Module {
  std::string_view name, part, fused;
};
constexpr Module kModules[] = {
    {"q_proj", "linear_q", "linear_qkv"},
    {"k_proj", "linear_k", "linear_qkv"},
    {"v_proj", "linear_v", "linear_qkv"},
    {"o_proj", "linear_proj", "linear_proj"},
    {"output_proj", "linear_proj", "linear_proj"},
    {"gate_proj", "linear_fc1_gate", "linear_fc1"},
    {"w1", "linear_fc1_gate", "linear_fc1"},
    {"up_proj", "linear_fc1_up", "linear_fc1"},
    {"w3", "linear_fc1_up", "linear_fc1"},
    {"down_proj", "linear_fc2", "linear_fc2"},
    {"w2", "linear_fc2", "linear_fc2"},
    // Modules that are fused in Transformers too.
    {"c_attn", "", "linear_qkv"},
    {"qkv_proj", "", "linear_qkv"},
    {"gate_up_proj", "", "linear_fc1"},
    {"c_fc", "", "linear_fc1"},
    {"c_proj", "", "linear_proj linear_fc2"},
};
constexpr const char* kParts[] = {"linear_q",        "linear_k",      "linear_v",  "linear_proj",
                                  "linear_fc1_gate", "linear_fc1_up", "linear_fc2"};
constexpr const char* kFused[] = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"};

std::string last_part(std::string_view name, char separator) {
  return std::string(name.substr(name.rfind(separator) + 1));
}

const Module* find_module(const Node& node) {
  const std::string name = last_part(node.text, '.');
  const auto* found = std::find_if(std::begin(kModules), std::end(kModules),
                                   [&](const Module& module) { return module.name == name; });
  return found == std::end(kModules) ? nullptr : found;
}

void set_scheme(Draft& draft, const SourceKey& from, bool parts, bool dora) {
  draft.set("peft.scheme", std::string(parts ? "canonical_" : "") + (dora ? "dora" : "lora"), from,
            parts ? "an adapter for each of q, k, v, gate and up" : "");
}

// Whether the name can be a file or directory: it contains no `..` and is no URL.
std::string plain_name(std::string_view name) {
  while (name.ends_with('/')) name.remove_suffix(1);
  std::string plain = with_plain_characters(last_part(name, '/'));
  while (plain.starts_with('.')) plain.erase(0, 1);
  return plain.empty() ? "base" : plain.substr(0, 100);
}

}  // namespace

bool is_path(std::string_view name) {
  return name.starts_with('/') || name.starts_with("./") || name.starts_with("../") || name == "." ||
         name == "..";
}

void base_weights(Draft& draft, const std::string& name, const SourceKey& from) {
  const char* field_path = "checkpoint.pretrained_checkpoint";
  if (is_path(name))
    draft.set(field_path, "hf:" + name, from);
  else
    draft.set(field_path, "hf:models/" + plain_name(name), from,
              "where " + name + " is expected, as the hub has it");
  tokenizer_of_base(draft);
}

void tokenizer_of_base(Draft& draft) {
  draft.assume_preset("tokenizer", "huggingface", "the base model's");
  draft.refer("tokenizer.tokenizer_model", "checkpoint.pretrained_checkpoint", "beside the weights");
}

void save_and_load(Reader& reader, std::string_view save, std::string_view load) {
  const auto to = reader.text(save), from = reader.text(load);
  if (to) reader.set("checkpoint.save", *to, save);
  if (!from) return;
  if (to == from)
    reader.omit(load, *from, OmissionReason::no_effect, std::string(kResume));
  else
    reader.omit(load, *from, OmissionReason::external, std::string(kCheckpoint));
}

void adapt_modules(Draft& draft, const AdaptedModules& adapted) {
  bool fused = false;
  std::vector<const Module*> known;
  for (const Node& node : adapted.modules) {
    const Module* module = find_module(node);
    known.push_back(module);
    if (!module)
      draft.omit({adapted.from.key, node.location}, node, OmissionReason::unsupported,
                 "adapters are supported on the linear layers of the transformer layers");
    fused = fused || (module && module->part.empty());
  }
  Node list{.kind = Node::Kind::list, .location = adapted.from.location};
  for (const std::string_view layer : fused ? std::span<const char* const>(kFused) : kParts) {
    if (std::none_of(known.begin(), known.end(), [&](const Module* module) {
          const auto names = split(!module ? "" : fused ? module->fused : module->part, ' ');
          return std::find(names.begin(), names.end(), layer) != names.end();
        }))
      continue;
    const std::string name(layer);
    if (adapted.layers.empty()) list.items.push_back(Node::scalar(name, adapted.from.location));
    for (const Node& of : adapted.layers)
      list.items.push_back(Node::scalar("*.layers." + of.text + ".*." + name, adapted.from.location));
  }
  if (list.items.empty()) return;
  set_scheme(draft, adapted.scheme, !fused, adapted.dora);
  draft.set("peft.target_modules", list, adapted.from);
}

void adapt_all_modules(Draft& draft, const SourceKey& scheme, bool dora, const SourceKey& from,
                       const std::string& reason) {
  // The modules of these presets are fused in Transformers too.
  const std::string preset = draft.preset("model");
  const bool fused = preset.starts_with("gpt2") || preset.starts_with("phi3");
  Node list{.kind = Node::Kind::list, .location = from.location};
  for (const char* name : fused ? std::span<const char* const>(kFused) : kParts)
    list.items.push_back(Node::scalar(name, from.location));
  set_scheme(draft, scheme, !fused, dora);
  if (!from.key.empty())
    draft.set("peft.target_modules", list, from);
  else
    draft.assume("peft.target_modules", list, reason);
}

void sample_files(Draft& draft, std::string_view field_path, const std::vector<std::string>& names,
                  const SourceKey& from) {
  Node list{.kind = Node::Kind::list, .location = from.location};
  std::string elsewhere;
  for (const std::string& name : names) {
    const bool file = is_path(name) || name.find(".json") != std::string::npos;
    if (!file) elsewhere += (elsewhere.empty() ? "" : ", ") + name;
    list.items.push_back(Node::scalar(file ? name : "data/" + plain_name(name) + ".jsonl", from.location));
  }
  draft.set(field_path, list, from,
            elsewhere.empty() ? "" : "where " + elsewhere + " is expected, as JSON lines");
}

std::string split_with(double fraction) {
  constexpr int64_t kTotal = 1'000'000;
  const int64_t part =
      std::clamp<int64_t>(std::llround(fraction * static_cast<double>(kTotal)), 1, kTotal - 1);
  const int64_t divisor = std::gcd(part, kTotal);
  return std::to_string((kTotal - part) / divisor) + "," + std::to_string(part / divisor) + ",0";
}

}  // namespace capstan::importers

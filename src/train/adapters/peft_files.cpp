#include "train/adapters/peft_files.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/reader.hpp"
#include "config/core/external.hpp"
#include "formats/hf_directory.hpp"
#include "formats/peft_mapping.hpp"
#include "train/adapters/export_files.hpp"
#include "train/adapters/stored_adapters.hpp"

namespace capstan::train {

using formats::WriteResult;

static WriteResult summary_of(checkpoint::TensorSource& tensors, const std::string& kind) {
  WriteResult written;
  written.kind = kind;
  for (const std::string& name : tensors.names()) {
    const checkpoint::TensorInfo& info = tensors.at(name);
    ++written.tensors;
    written.bytes += info.shape.elements() * size_of(info.dtype);
  }
  return written;
}

static std::string kind_of(const config::PeftConfig& peft) {
  return "adapters (" + std::string(enum_name(peft.scheme)) + ", rank " + std::to_string(peft.dim) + ")";
}

// The tokenizer and its settings, which users of PEFT save beside adapters. Empty without a tokenizer.
static formats::Assets tokenizer_files(formats::Assets files) {
  const auto is_tokenizer = [](const auto& file) { return formats::is_tokenizer_file(file.first); };
  if (std::ranges::none_of(files, is_tokenizer)) return {};
  std::erase_if(files, [&](const auto& file) {
    return !is_tokenizer(file) && file.first != "tokenizer_config.json" &&
           file.first != "special_tokens_map.json" && file.first != "added_tokens.json" &&
           file.first != "chat_template.jinja";
  });
  return files;
}

// What PEFT computes otherwise where Transformers 5 has the experts of a layer in one tensor, for which PEFT
// converts the adapters as it loads them (docs/adapters.md). Empty: nothing.
static std::string differences_of_peft(const formats::PeftAdapter& adapter) {
  const auto of_expert = [](const formats::AdapterModule& one) {
    return one.module.find(".experts.") != std::string::npos;
  };
  const auto last_name = [](const formats::AdapterModule& one) {
    return one.module.substr(one.module.rfind('.') + 1);
  };
  std::set<std::string> names;
  for (const auto& one : adapter.modules)
    if (of_expert(one)) names.insert(last_name(one));
  std::string wrong;
  const auto beside = std::ranges::find_if(
      adapter.modules, [&](const auto& one) { return !of_expert(one) && names.contains(last_name(one)); });
  if (beside != adapter.modules.end())
    wrong =
        "leaves out the adapters of `" + beside->module + "` and all other modules with a name of experts";
  if (adapter.config.rank_stabilized && !names.empty())
    wrong += std::string(wrong.empty() ? "" : ", and ") + "scales rsLoRA of experts wrongly";
  return wrong.empty() ? wrong
                       : "PEFT with Transformers 5 " + wrong + "; `capstan merge` merges them as trained";
}

WriteResult write_peft_files(const std::string& from, const std::filesystem::path& to,
                             const std::optional<std::string>& base) {
  const StoredRecipe run = stored_recipe(from, {}, 1);
  run.resolution.require_ok();
  const config::Config& config = run.resolution.config;
  if (!config.peft)
    fail(ErrorCode::usage, "`" + from + "` holds a full model, not adapters",
         "convert it as a full model: capstan convert " + from + " hf:DIRECTORY");
  auto reader = checkpoint::Reader::open(run.checkpoint, checkpoint::Verification::structure);
  std::string named = base.value_or("");
  if (const auto& weights = config.checkpoint.pretrained_checkpoint; named.empty() && weights)
    named = weights->resolved;
  if (const auto [scheme, path] = config::split_scheme(named); scheme == "hf:") named = std::string(path);
  const auto names = formats::class_names(config.model, assets_in(reader));
  const auto adapter = formats::to_peft(formats::read_adapters(reader, *config.peft, config.model),
                                        config.model, names, named);
  const formats::Assets beside = tokenizer_files(export_files(reader, config));
  formats::write_peft(to, adapter, beside);
  WriteResult written = summary_of(*formats::adapter_tensors(adapter.modules, ""), kind_of(*config.peft));
  written.note = differences_of_peft(adapter);
  written.files = {"adapter_config.json", "adapter_model.safetensors"};
  for (const auto& file : beside) written.files.push_back(file.first);
  return written;
}

WriteResult read_peft_files(const std::string& from, const std::filesystem::path& to,
                            const std::optional<std::string>& base) {
  StoredBase beside = base_of_adapters(from, base, {});
  const StoredAdapters adapters = open_adapters(from, beside.weights, beside.recipe.resolution.config.model);
  std::vector<config::Override> overrides = beside.overrides;
  for (const std::string& text : adapter_overrides(adapters.peft))
    overrides.push_back(config::Override::token(text));
  overrides.push_back(config::Override::token("peft.dropout=" + to_text(adapters.peft.dropout)));
  overrides.push_back(
      config::Override::token("checkpoint.pretrained_checkpoint=" + in_quotes(beside.weights.path())));
  const StoredRecipe recipe = stored_recipe(beside.recipe.checkpoint.string(), overrides, 1);
  recipe.resolution.require_ok();
  WriteResult written = summary_of(*adapters.tensors, kind_of(adapters.peft));
  written.files =
      formats::write_first_checkpoint(
          {&recipe.resolution, adapters.tensors.get(), {}, beside.weights.assets(), beside.weights.hash()},
          to)
          .files;
  return written;
}

}  // namespace capstan::train

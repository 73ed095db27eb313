// capstan convert

#include "formats/convert.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "checkpoint/reader.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/stored_model.hpp"
#include "cli/terminal.hpp"
#include "config/core/external.hpp"
#include "train/adapters/export_files.hpp"
#include "train/adapters/peft_files.hpp"
#include "train/setup/stored_recipe.hpp"

namespace capstan::cli {

namespace {

using formats::WriteResult;

constexpr std::string_view kPeft = "peft:";

std::optional<DType> dtype_argument(const Arguments& args) {
  const auto word = args.value("dtype");
  if (!word) return std::nullopt;
  if (*word == "f32") return DType::f32;
  if (*word == "bf16") return DType::bf16;
  fail(ErrorCode::usage, "`--dtype " + *word + "`: weights are written as f32 or bf16",
       "without it they keep their type");
}

formats::GgufType gguf_type(const std::string& word) {
  if (word == "f32") return formats::GgufType::f32;
  if (word == "f16") return formats::GgufType::f16;
  if (word == "bf16") return formats::GgufType::bf16;
  if (word == "q8_0") return formats::GgufType::q8_0;
  fail(ErrorCode::usage, "`--type " + word + "` is not a GGUF data type of this program",
       "one of: f32, f16, bf16, q8_0");
}

// "5GB", "500MB", decimal as Transformers has them.
int64_t shard_bytes(const std::string& text) {
  for (const auto& [suffix, unit] :
       {std::pair{"GB", 1e9}, std::pair{"MB", 1e6}, std::pair{"KB", 1e3}, std::pair{"", 1.0}})
    if (text.ends_with(suffix)) {
      const auto number =
          parse_double(std::string_view(text).substr(0, text.size() - std::string_view(suffix).size()));
      if (number && *number * unit >= 1 && *number * unit < 9e18) return static_cast<int64_t>(*number * unit);
      break;
    }
  fail(ErrorCode::usage, "`--shard-size " + text + "` is not a size", "5GB, 500MB or a number of bytes");
}

WriteResult write_external(const Context& context, const formats::ExportSource& from, const std::string& to) {
  const std::string path = to.substr(to.find(':') + 1);
  if (path.empty()) fail(ErrorCode::usage, "`" + to + "` names nothing", "write hf:DIRECTORY or gguf:FILE");
  if (to.starts_with("gguf:"))
    return formats::write_gguf(from, path, gguf_type(context.args.value("type").value_or("f16")));
  formats::HfOptions options;
  options.dtype = dtype_argument(context.args);
  if (const auto size = context.args.value("shard-size")) options.shard_bytes = shard_bytes(*size);
  return formats::write_hf(from, path, options);
}

void note_no_tokenizer(const Context& context, const std::string& from, const std::string& to, bool mock) {
  if (!context.quiet())
    print_stderr("note: " + to + " has no tokenizer, since " + from + " has none" +
                 (mock ? ": its run trained on mock data" : "") + "\n");
}

WriteResult convert_external(const Context& context, const std::string& from, const std::string& to) {
  const auto model = formats::ExternalModel::open(from);
  if (!config::is_external_model("model", to))
    return formats::write_checkpoint(*model, to, dtype_argument(context.args));
  config::ModelConfig described = model->model();
  const formats::PredictionLayers layers = model->kept_prediction_layers();
  if (layers.count > 0) described.mtp_num_layers = layers.count;
  const auto parameters = model->parameters(described);
  WriteResult written = write_external(context, {parameters.get(), described, model->assets()}, to);
  written.note = layers.left_out;
  if (!written.tokenizer) note_no_tokenizer(context, from, to, false);
  return written;
}

WriteResult convert_adapters(const std::string& from, const std::string& to,
                             const std::optional<std::string>& base) {
  WriteResult written = train::write_peft_files(from, to.substr(kPeft.size()), base);
  const train::StoredRecipe run = train::stored_recipe(from, {}, 1);
  warn_of_turn_end(checkpoint::Reader::open(run.checkpoint, checkpoint::Verification::structure),
                   run.resolution.config);
  return written;
}

WriteResult convert_checkpoint(const Context& context, const std::string& from, const std::string& to) {
  const train::StoredRecipe stored = train::stored_recipe(from, {}, 1);
  if (stored.resolution.ok() && stored.resolution.config.peft)
    fail(ErrorCode::usage, "`" + from + "` holds adapters, not a full model",
         "write them to peft:DIRECTORY, or merge them first: `capstan merge " + from +
             " MERGED`, then convert MERGED to " + to);
  if (!stored.resolution.ok()) {
    show_diagnostics(context, stored.resolution);
    throw CommandExit{exit_code_of(ErrorCode::config)};
  }
  auto reader = checkpoint::Reader::open(stored.checkpoint, checkpoint::Verification::structure);
  const formats::ExportSource exported{&reader, stored.resolution.config.model,
                                       train::export_files(reader, stored.resolution.config)};
  WriteResult written = write_external(context, exported, to);
  warn_of_turn_end(reader, stored.resolution.config);
  if (!written.tokenizer)
    note_no_tokenizer(context, from, to, stored.resolution.config.dataset.kind == config::DatasetKind::mock);
  return written;
}

// "did you mean `gguf:x`? " for a name with a misspelled scheme, such as `ggfu:x`.
std::string near_scheme(const std::string& name) {
  const size_t colon = name.find(':');
  if (colon == std::string::npos || name.find('/') < colon) return {};
  const std::string near =
      did_you_mean(name.substr(0, colon), {"hf", "gguf", "peft"}, "", name.substr(colon));
  return near.empty() ? near : near + " ";
}

int run_convert(Context& context) {
  const std::string &from = context.args.word(0, "FROM"), &to = context.args.word(1, "TO");
  const bool adapters_in = from.starts_with(kPeft), adapters_out = to.starts_with(kPeft);
  if (!config::is_external_model("model", from) && !config::is_external_model("model", to) && !adapters_in &&
      !adapters_out)
    fail(ErrorCode::usage,
         "neither `" + from + "` nor `" + to + "` names a model of another program: one of them must",
         near_scheme(from) + near_scheme(to) + "write it as hf:DIRECTORY, gguf:FILE or peft:DIRECTORY");
  for (const std::string* name : {&from, &to})
    if (*name == kPeft) fail(ErrorCode::usage, "`" + *name + "` names nothing", "peft:DIRECTORY");
  const bool gguf = to.starts_with("gguf:");
  if (adapters_in && adapters_out)
    fail(ErrorCode::usage, "`" + from + "` and `" + to + "` are both PEFT's",
         "copy the directory; a Capstan checkpoint is a path without a scheme");
  if (adapters_in && config::is_external_model("model", to))
    fail(ErrorCode::usage, "`" + from + "` holds adapters, and " + to + " takes a full model",
         "merge them into their base first: capstan merge " + from + " MERGED --base hf:DIRECTORY");
  if ((adapters_in || adapters_out) && context.args.has("dtype"))
    fail(ErrorCode::usage, "`--dtype` applies to full models: adapters stay in fp32");
  if (context.args.has("base") && !adapters_in && !adapters_out)
    fail(ErrorCode::usage, "`--base` applies to adapters: FROM or TO is peft:DIRECTORY then");
  if (context.args.has("type") && !gguf)
    fail(ErrorCode::usage, "`--type` applies to GGUF files", "write gguf:" + to);
  if (gguf && context.args.has("dtype"))
    fail(ErrorCode::usage, "`--dtype` does not apply to GGUF files", "use --type bf16");
  if (context.args.has("shard-size") && !to.starts_with("hf:"))
    fail(ErrorCode::usage, "`--shard-size` applies to safetensors files", "write hf:DIRECTORY");
  const auto base = context.args.value("base");
  const WriteResult written = adapters_in    ? train::read_peft_files(from, to, base)
                              : adapters_out ? convert_adapters(from, to, base)
                              : config::is_external_model("model", from)
                                  ? convert_external(context, from, to)
                                  : convert_checkpoint(context, from, to);
  if (!written.note.empty() && !context.quiet()) print_stderr("note: " + from + ": " + written.note + "\n");
  if (context.args.has("json")) {
    put(dump_json(OrderedJson{{"schema", "capstan.convert/1"},
                              {"from", from},
                              {"to", to},
                              {"model", written.kind},
                              {"tensors", written.tensors},
                              {"bytes", written.bytes},
                              {"files", written.files}}) +
        "\n");
  } else if (!context.quiet()) {
    print_stderr(to + ": " + written.kind + ", " + std::to_string(written.tensors) + " tensors, " +
                 human_bytes(static_cast<double>(written.bytes)) + "\n");
  }
  return 0;
}

}  // namespace

const Command kConvert = {
    .name = "convert",
    .purpose = "convert models and adapters between checkpoints and external formats",
    .usage = "FROM TO [flags]",
    .examples = {{"convert hf:SmolLM2-135M smollm2", "safetensors of Hugging Face to a checkpoint"},
                 {"convert runs/tuned hf:tuned", "a run's newest checkpoint for Transformers"},
                 {"convert runs/tuned gguf:tuned.gguf --type q8_0", "for llama.cpp and its like"},
                 {"convert gguf:model.gguf hf:model", ""},
                 {"convert runs/tuned-lora peft:my-lora", "a run's adapters for PEFT"},
                 {"convert peft:my-lora adapters --base hf:SmolLM2-135M", "and back"}},
    .options = {{"dtype", 0, "TYPE", "data type of all weights: f32 or bf16; default: unchanged", "",
                 "f32 bf16"},
                {"type", 0, "TYPE", "data type of the matrices of a GGUF file; default f16", "",
                 "f32 f16 bf16 q8_0"},
                {"base", 0, "BASE",
                 "adapters: the base weights; when writing peft:, the name of the base model"},
                {"shard-size", 0, "SIZE", "maximum size of a safetensors file; default 5GB"},
                {"json", 0, "", "print what was written as one JSON object"}},
    .details =
        "FROM and TO are a checkpoint or run, hf:DIRECTORY or gguf:FILE; at least one of them is a model of\n"
        "another program. Adapters are converted from or to peft:DIRECTORY.\n"
        "Nothing is overwritten. `capstan help formats` lists the supported models.\n",
    .max_words = 2,
    .run = run_convert,
};

}  // namespace capstan::cli

// Converting Transformers' files to a checkpoint and back preserves the bytes of every tensor and of every
// small file.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/safetensors.hpp"
#include "config/resolve/resolve.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/rotary.hpp"
#include "formats/convert.hpp"
#include "formats/family.hpp"
#include "formats/gguf_arch.hpp"
#include "formats/hf_config.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "models/registry.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::formats;
using test::error_of;
using test::holds;
namespace fs = std::filesystem;

namespace {

const fs::path kFamilies = test::kFormatFixtures / "families";

std::vector<std::byte> bytes_of(checkpoint::TensorSource& source, const std::string& name) {
  const auto& info = source.at(name);
  std::vector<std::byte> bytes(static_cast<size_t>(info.shape.elements() * size_of(info.dtype)));
  source.read_all(name, info.dtype, bytes);
  return bytes;
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}
void replace_in(const fs::path& path, const std::string& from, const std::string& to) {
  std::string text = read_file(path);
  REQUIRE(text.find(from) != std::string::npos);
  write(path, text.replace(text.find(from), from.size(), to));
}

// A copy of a fixture that a test damages.
struct Copy {
  test::TemporaryDirectory home;
  fs::path path;
  explicit Copy(const std::string& name) : path(home.path() / name) {
    fs::create_directory(path);
    for (const auto& entry : fs::directory_iterator(kFamilies / name))
      if (entry.path().filename() != "expected.safetensors")
        fs::copy_file(entry.path(), path / entry.path().filename());
  }
  std::string error() const {
    return error_of([&] {
      const auto model = ExternalModel::open("hf:" + path.string());
      model->parameters(model->model());
    });
  }
};

}  // namespace

TEST_CASE("Transformers' files to a checkpoint and back: tensors and small files byte for byte") {
  for (const auto& entry : fs::directory_iterator(kFamilies)) {
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    test::TemporaryDirectory home;
    const auto external = ExternalModel::open("hf:" + entry.path().string());
    const WriteResult in = write_checkpoint(*external, home.path() / "checkpoint", {});
    CHECK(in.tensors == static_cast<int64_t>(external->parameters(external->model())->names().size()));
    auto reader = checkpoint::Reader::open(home.path() / "checkpoint", checkpoint::Verification::content);
    write_hf(test::exported_of(reader, external->model()), home.path() / "back");

    HfDirectory before(entry.path()), after(home.path() / "back");
    for (const std::string& tensor : before.names()) {
      if (tensor.ends_with(".attn.bias") || tensor.ends_with("masked_bias")) continue;  // buffers
      CAPTURE(tensor);
      REQUIRE(after.find(tensor));
      CHECK(after.at(tensor).dtype == before.at(tensor).dtype);
      CHECK(after.at(tensor).shape == before.at(tensor).shape);
      CHECK(bytes_of(after, tensor) == bytes_of(before, tensor));
    }
    for (const std::string& tensor : after.names()) CHECK(before.find(tensor));
    CHECK(before.assets() == after.assets());
    for (const std::string& file : before.assets()) {
      CAPTURE(file);
      std::string expected = before.read_text(file);
      // The class writes its default, and no such layer.
      const std::string named = "\"num_nextn_predict_layers\": ";
      if (const size_t at = expected.find(named); at != std::string::npos && file == kConfigFile)
        expected[at + named.size()] = '0';
      CHECK(expected == after.read_text(file));
    }
    for (const auto& file : fs::directory_iterator(home.path() / "back"))
      if (file.path().extension() == ".safetensors") CHECK(fs::exists(entry.path() / file.path().filename()));
  }
}

TEST_CASE("a config.json made from a recipe describes the same model") {
  for (const auto& entry : fs::directory_iterator(kFamilies)) {
    CAPTURE(entry.path());
    const auto external = ExternalModel::open("hf:" + entry.path().string());
    const HfConfig made = write_hf_config(external->model(), DType::f32);
    CHECK(differences(external->model(), read_hf_config(made.text, "made").model).empty());
  }
}

TEST_CASE("a recipe made from a model resolves to it") {
  for (const auto& entry : fs::directory_iterator(kFamilies)) {
    CAPTURE(entry.path());
    const auto external = ExternalModel::open("hf:" + entry.path().string());
    const auto resolution = resolve_recipe(*external);
    if (!resolution.ok()) {
      CAPTURE(error_of([&] { resolution.require_ok(); }));
      CHECK(resolution.ok());
    }
    CHECK(differences(resolution.config.model, external->model()).empty());
    CHECK(resolution.config.model.hidden_dropout == external->model().hidden_dropout);
  }
}

TEST_CASE("a model of no family is refused with the field that differs") {
  config::ModelConfig model = ExternalModel::open("hf:" + (kFamilies / "llama").string())->model();
  model.rotary_interleaved = true;
  CHECK(holds(error_of([&] { write_hf_config(model, DType::f32); }), "model.rotary_interleaved is true"));
}

namespace {

// The message that refuses the export of the model of a recipe; empty: it is written.
std::string refused_export(const std::vector<std::string>& overrides) {
  config::Request request;
  request.recipe = "quickstart";
  request.unset = {"model"};
  for (const std::string& one : overrides) request.overrides.push_back(config::Override::token(one));
  const config::Resolution recipe = config::resolve(request);
  recipe.require_ok();
  return error_of([&] { write_hf_config(recipe.config.model, DType::f32); });
}

}  // namespace

// A recipe says in other fields what config.json says: biases of all layers, the width of no dense layer.
TEST_CASE("the models of recipes are written as config.json") {
  for (const auto& preset : config::Library::standard().presets("model")) {
    CAPTURE(preset.name);
    // The LayerNorm of GPT-3 is zero-centered.
    const bool refused = !refused_export({"model=" + preset.name}).empty();
    CHECK(refused == (preset.name == "gpt3-175b"));
  }
  CHECK(refused_export({"model=mixtral-8x7b", "model.moe_ffn_hidden_size=96"}).empty());
  // No family of another shape stops the search, such as GPT-2 with a width of no full heads.
  CHECK(refused_export({"model=gpt-oss-20b", "model.hidden_size=184"}).empty());
  CHECK(holds(refused_export({"model=gpt-oss-20b", "model.hidden_size=184", "model.rotary_interleaved=true"}),
              "the nearest is gpt_oss:\n    model.rotary_interleaved is true"));
}

TEST_CASE("the layers with experts of a Qwen are those of its class, and an export names the others") {
  const auto read = [](const std::string& dense, int64_t step) {
    Copy copy("qwen3_moe_turns");
    replace_in(copy.path / "config.json", "\"mlp_only_layers\": [\n    0,\n    2\n  ]",
               "\"mlp_only_layers\": " + dense);
    replace_in(copy.path / "config.json", "\"decoder_sparse_step\": 1",
               "\"decoder_sparse_step\": " + std::to_string(step));
    return read_hf_config(read_file(copy.path / "config.json"), "config.json").model;
  };
  using Layers = std::vector<int64_t>;
  for (const auto& [dense, step, experts] : {std::tuple<std::string, int64_t, Layers>{"[]", 1, {0, 1, 2, 3}},
                                             {"[0, 1]", 1, {2, 3}},
                                             {"[1, 3]", 1, {0, 2}},
                                             {"[]", 2, {1, 3}},
                                             {"[1, 7]", 2, {3}},
                                             {"[0]", 3, {2}}}) {
    CAPTURE(dense);
    CAPTURE(step);
    const config::ModelConfig model = read(dense, step);
    CHECK(config::moe_layers(model) == experts);
    const HfModel back = read_hf_config(write_hf_config(model, DType::f32).text, "config.json");
    CHECK(config::moe_layers(back.model) == experts);
  }
  CHECK(read("[1, 3]", 1).moe_layer_freq == 2);
  CHECK(read("[0, 1]", 1).moe_first_dense_layers == 2);
  CHECK(read("[]", 2).moe_layer_freq.items == Layers{0, 1, 0, 1});
}

TEST_CASE("models with experts that Capstan does not compute are refused by name") {
  const auto refused = [](const char* family, const std::string& from, const std::string& to) {
    Copy copy(family);
    replace_in(copy.path / "config.json", from, to);
    return copy.error();
  };
  CHECK(holds(refused("mixtral", "\"router_jitter_noise\": 0.0", "\"router_jitter_noise\": 0.1"),
              "router_jitter_noise"));
  CHECK(
      holds(refused("mixtral", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 6"), "of 5 experts"));
  CHECK(holds(refused("mixtral", "\"num_local_experts\": 5", "\"num_local_experts\": 5, \"num_experts\": 4"),
              "differ"));
  CHECK(holds(refused("olmoe", "\"clip_qkv\": null", "\"clip_qkv\": 8.0"), "clip_qkv"));
  CHECK(holds(refused("qwen3_moe", "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 4"),
              "no layer has experts"));
  CHECK(holds(refused("qwen3_moe", "\"mlp_only_layers\": [\n    0", "\"mlp_only_layers\": [\n    0.5"),
              "mlp_only_layers"));
  CHECK(holds(refused("qwen2_moe", "\"use_sliding_window\": false", "\"use_sliding_window\": true"),
              "use_sliding_window"));
  const std::string any = "\"use_cache\": true";
  for (const auto& [family, key, value] :
       {std::array<std::string, 3>{"deepseek_v3_moe", "scoring_func", "\"softmax\""},
        {"deepseek_v3_moe", "topk_method", "\"greedy\""},
        {"deepseek_v3_moe", "moe_layer_freq", "2"},
        {"deepseek_v3_moe", "num_experts", "7"},
        {"deepseek_v2_moe", "scoring_func", "\"sigmoid\""},
        {"deepseek_v2_moe", "aux_loss_alpha", "-0.5"},
        {"gpt_oss", "experts_per_token", "3"}})
    CHECK(holds(refused(family.c_str(), any, "\"" + key + "\": " + value), "`" + key + "`"));
  CHECK(holds(refused("gpt_oss", any, "\"quantization_config\": {\"quant_method\": \"gptq\"}"),
              "`quant_method`"));
  CHECK(refused("deepseek_v3_moe", any,
                "\"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"moe_layer_freq\": 1, "
                "\"aux_loss_alpha\": 0.001, \"seq_aux\": true")
            .empty());
  for (const auto& [family, from, to] :
       {std::array<std::string, 3>{"deepseek_v3_moe", "\"norm_topk_prob\": true",
                                   "\"norm_topk_prob\": false"},
        {"deepseek_v3_moe", "\"topk_group\": 2", "\"topk_group\": 5"},
        {"deepseek_v3_moe", "\"n_group\": 4", "\"n_group\": 8"},
        {"deepseek_v2_moe", "\"topk_method\": \"group_limited_greedy\"", "\"topk_method\": \"noaux_tc\""},
        {"deepseek_v2_moe", "\"norm_topk_prob\": false", "\"norm_topk_prob\": true"},
        {"gpt_oss", "\"swiglu_alpha\": 1.702", "\"swiglu_alpha\": 1.5"},
        {"gpt_oss", "\"swiglu_limit\": 0.4", "\"swiglu_limit\": 0.0"},
        {"gpt_oss", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""}}) {
    const std::string error = refused(family.c_str(), from, to);
    CHECK_MESSAGE(holds(error, from.substr(1, from.find('"', 1) - 1)), error);
  }
}

TEST_CASE("shards hold no more than they may, and read back") {
  test::TemporaryDirectory home;
  const auto external = ExternalModel::open("hf:" + (kFamilies / "qwen3").string());
  const auto parameters = external->parameters(external->model());
  const WriteResult written = write_hf({parameters.get(), external->model(), external->assets()},
                                       home.path() / "out", {.shard_bytes = 9000});
  CHECK(fs::exists(home.path() / "out" / kIndexFile));
  CHECK(written.files.size() > 5);
  HfDirectory before(kFamilies / "qwen3"), after(home.path() / "out");
  CHECK(before.names() == after.names());
  // The export keeps the original index, unless another file size is requested.
  const auto sharded = ExternalModel::open("hf:" + (home.path() / "out").string());
  const auto again = sharded->parameters(sharded->model());
  const ExportSource from{again.get(), sharded->model(), sharded->assets()};
  CHECK(write_hf(from, home.path() / "same").files == written.files);
  CHECK(write_hf(from, home.path() / "one", {.shard_bytes = 1'000'000}).files.size() < 5);
  CHECK(holds(error_of([&] {
                write_hf({parameters.get(), external->model(), {}}, home.path() / "out");
              }),
              "exists already"));
}

TEST_CASE("keys of config.json that Capstan does not support are refused by name") {
  const auto refused = [](const std::string& from, const std::string& to) {
    Copy copy("smollm2");
    replace_in(copy.path / "config.json", from, to);
    return copy.error();
  };
  const std::string any = "\"use_cache\": true";
  CHECK(refused(any, "\"use_cache\": true").empty());
  CHECK(refused(any, "\"some_new_key\": null, \"other\": false, \"third\": []").empty());
  for (const char* key : {"attention_multiplier", "residual_multiplier", "logits_scaling", "no_rope_layers"})
    CHECK(holds(refused(any, "\"" + std::string(key) + "\": 2"), key));
  CHECK(holds(refused(any, "\"quantization_config\": {\"bits\": 4}"), "quantization_config"));
  CHECK(holds(refused("\"hidden_act\": \"silu\"", "\"hidden_act\": \"xielu\""), "xielu"));
  CHECK(holds(refused("\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2.0}"),
              "dynamic"));
  CHECK(holds(refused("\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.0}"),
              "below 1"));
  CHECK(holds(refused("\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"linear\", \"fator\": 2.0}"),
              "fator"));
  CHECK(
      holds(refused("LlamaForCausalLM", "LlamaForSequenceClassification"), "LlamaForSequenceClassification"));
  CHECK(holds(refused("\"model_type\": \"llama\"", "\"model_type\": \"lama\""), "`model_type`"));
  // Types and sizes.
  for (const char* value : {"0", "-4", "4.0", "\"4\"", "true", "99999999999", "null"})
    CHECK(!refused("\"num_attention_heads\": 4", "\"num_attention_heads\": " + std::string(value)).empty());
  CHECK(holds(refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), "not a multiple"));
  CHECK(holds(refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 8"), "not a multiple"));
  CHECK(holds(refused("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e999"), "bad JSON"));
  CHECK(holds(refused("\"vocab_size\": 270", "\"vocab_size\": 271"), "model.embed_tokens.weight"));
  CHECK(holds(refused(any, "\"mlp_bias\": true"), "mlp_bias"));  // twice
  CHECK(holds(refused("\"mlp_bias\": false", "\"mlp_bias\": true"), "mlp.down_proj.bias"));
  CHECK(holds(refused("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"), "layers.1"));
  CHECK(holds(refused("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"), "lm_head.weight"));
}

TEST_CASE("partial_rotary_factor is supported for Phi-3 only: other classes of Transformers ignore the key") {
  const auto defaults = capstan::json_of(read_file(kFamilies.parent_path() / "class_defaults.json"));
  for (const auto& [type, complete] : defaults.items()) {
    // GPT-NeoX's key has another name.
    if (type == "gpt2" || type == "gpt_neox") continue;
    CAPTURE(type);
    nlohmann::json config = complete;
    const auto set = [&](double share) {
      config["partial_rotary_factor"] = share;
      if (config.contains("rope_parameters") && config["rope_parameters"].is_object())
        config["rope_parameters"]["partial_rotary_factor"] = share;
    };
    set(0.5);
    const std::string error = error_of([&] { read_hf_config(capstan::dump_json(config), "config.json"); });
    CHECK(error.empty() == (type == "phi3"));
    if (type != "phi3") CHECK(holds(error, "`partial_rotary_factor` is 0.5"));
    set(1);
    CHECK(error_of([&] { read_hf_config(capstan::dump_json(config), "config.json"); }).empty());
  }
}

TEST_CASE("the number of positions is the file's, also where a run takes shorter sequences") {
  const auto defaults = capstan::json_of(read_file(kFamilies.parent_path() / "class_defaults.json"));
  for (const auto& [type, complete] : defaults.items()) {
    CAPTURE(type);
    nlohmann::json config = complete;
    config[type == "gpt2" ? "n_positions" : "max_position_embeddings"] = 96;
    const HfModel model = read_hf_config(capstan::dump_json(config), "config.json");
    CHECK(model.model.seq_length == 96);
    CHECK(holds(section_text(model.model), "max_position_embeddings: 96\n"));
  }
}

TEST_CASE("a key that config.json lacks has the value that Transformers' class gives it") {
  const auto defaults = capstan::json_of(read_file(kFamilies.parent_path() / "class_defaults.json"));
  // The class of Kimi K2 is that of DeepSeek V3.
  CHECK(defaults.size() == all_families().size() - 1);
  // These keys are required.
  const std::set<std::string> needed = {"model_type",  "vocab_size",
                                        "hidden_size", "num_hidden_layers",
                                        "n_embd",      "intermediate_size",
                                        "n_layer",     "num_attention_heads",
                                        "n_head",      "max_position_embeddings"};
  for (const auto& [type, complete] : defaults.items()) {
    CAPTURE(type);
    const std::string truth = section_text(read_hf_config(capstan::dump_json(complete), "config.json").model);
    for (const auto& [key, value] : complete.items()) {
      CAPTURE(key);
      nlohmann::json less = complete;
      less.erase(key);
      if (needed.count(key) || (type == "deepseek_v2" && key == "num_experts_per_tok")) {
        CHECK(holds(error_of([&] { read_hf_config(capstan::dump_json(less), "config.json"); }),
                    "`" + key + "` is missing"));
        less[key] = nlohmann::json::array({"no"});
        CHECK(holds(error_of([&] { read_hf_config(capstan::dump_json(less), "config.json"); }),
                    "`" + key + "` is not a" + (key == "model_type" ? " string" : "n integer from 1 to ")));
        CHECK(holds(error_of([&] { read_hf_config(capstan::dump_json(less), "config.json"); }),
                    "but [\"no\"]"));
        continue;
      }
      CHECK(section_text(read_hf_config(capstan::dump_json(less), "config.json").model) == truth);
    }
  }
  // Windows are enabled, and their keys have no defaults; null disables them.
  for (const char* type : {"qwen2", "qwen3"}) {
    nlohmann::json config = defaults[type];
    config["use_sliding_window"] = true;
    config["num_hidden_layers"] = 30;
    for (const char* key : {"sliding_window", "max_window_layers", "layer_types"}) config.erase(key);
    CHECK(holds(error_of([&] { read_hf_config(capstan::dump_json(config), "config.json"); }),
                "every n-th layer"));  // from 28 on
    config["num_hidden_layers"] = 28;
    CHECK(!read_hf_config(capstan::dump_json(config), "config.json").model.window_size);
    config["max_window_layers"] = 0;
    CHECK(read_hf_config(capstan::dump_json(config), "config.json").model.window_size == 4096);
  }
  nlohmann::json gemma = defaults["gemma2"];
  gemma["final_logit_softcapping"] = gemma["attn_logit_softcapping"] = nullptr;
  CHECK(!read_hf_config(capstan::dump_json(gemma), "config.json").model.attn_logit_softcapping);
  CHECK(!read_hf_config(capstan::dump_json(gemma), "config.json").model.final_logit_softcapping);
  nlohmann::json mistral = defaults["mistral"];
  mistral["sliding_window"] = nullptr;
  CHECK(!read_hf_config(capstan::dump_json(mistral), "config.json").model.window_size);
}

TEST_CASE("RoPE's base counts wherever config.json has it, and may not be two") {
  auto config = capstan::json_of(read_file(kFamilies / "smollm2/config.json"));
  const auto base = [&] {
    return read_hf_config(capstan::dump_json(config), "config.json").model.rotary_base;
  };
  config.erase("rope_parameters");
  config["rope_theta"] = 5e5;
  CHECK(base() == 5e5);
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  CHECK(base() == 5e5);
  config["rope_scaling"]["rope_theta"] = 5e5;
  CHECK(base() == 5e5);
  config.erase("rope_theta");
  CHECK(base() == 5e5);
  config["rope_theta"] = 1e4;
  CHECK(holds(error_of(base), "`rope_theta` and that of `rope_scaling` differ"));
  config["rope_theta"] = 5e5;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 16}};
  CHECK(base() == 5e5);
  config["original_max_position_embeddings"] = 32;
  CHECK(holds(error_of(base), "`original_max_position_embeddings` and that"));
}

TEST_CASE("GPT-NeoX: RoPE's keys of Transformers 4, and layers that are not parallel") {
  auto config = capstan::json_of(read_file(kFamilies / "gpt_neox/config.json"));
  const auto read = [&] { return read_hf_config(capstan::dump_json(config), "config.json").model; };
  const config::ModelConfig model = read();
  CHECK(model.architecture == config::Architecture::gpt_neox);
  CHECK(config::rotary_width(model) == 4);
  const auto parameters = config["rope_parameters"];
  config.erase("rope_parameters");
  config["rotary_emb_base"] = 500;
  config["rotary_pct"] = 0.7;
  CHECK(section_text(read()) == section_text(model));
  config["rope_parameters"] = parameters;
  config["rotary_emb_base"] = 1000;
  CHECK(holds(error_of(read), "`rotary_emb_base` and that of `rope_parameters` differ"));
  config.erase("rotary_emb_base");
  config["use_parallel_residual"] = false;
  CHECK(read().architecture == config::Architecture::gpt);
  config::ModelConfig unwritable = model;
  unwritable.layernorm_zero_centered_gamma = true;
  CHECK(holds(error_of([&] { write_hf_config(unwritable, DType::f32); }), "a gpt_neox has"));
  CHECK(holds(error_of([&] { plan_gguf(model); }), "model.architecture"));
}

TEST_CASE("RoPE rotates an integer number of elements of a head") {
  config::ModelConfig model = ExternalModel::open("hf:" + (kFamilies / "phi3").string())->model();
  for (int64_t head = 2; head <= 256; head += 2)
    for (int64_t width = 2; width <= head; width += 2) {
      model.kv_channels = head;
      model.rotary_percent = static_cast<double>(width) / static_cast<double>(head);
      REQUIRE(config::rotary_width(model) == width);
    }
  model.kv_channels = 88;
  model.hidden_size = 88 * model.num_attention_heads;
  model.softmax_scale.reset();
  model.rotary_percent = 60 / 88.;  // times 88: 59.99…
  fill_in(model);
  models::build(model);
  const HfConfig made = write_hf_config(model, DType::f32);
  CHECK(static_cast<int>(88 * capstan::json_of(made.text)["partial_rotary_factor"].get<double>()) == 60);
}

TEST_CASE("DeepSeek's seq_aux is for the loss of each sequence alone") {
  using config::RouterBalancing;
  config::ModelConfig model = ExternalModel::open("hf:" + (kFamilies / "deepseek_v3_moe").string())->model();
  for (const auto type : {RouterBalancing::aux_loss, RouterBalancing::seq_aux_loss,
                          RouterBalancing::global_aux_loss, RouterBalancing::none}) {
    CAPTURE(static_cast<int>(type));
    model.moe_router_load_balancing_type = type;
    model.moe_aux_loss_coeff = type == RouterBalancing::none ? 0 : 0.01;
    const auto written = capstan::json_of(write_hf_config(model, DType::f32).text);
    CHECK(written["seq_aux"] == (type == RouterBalancing::seq_aux_loss));
  }
  // Of two losses, one with the sum of the coefficients.
  model.moe_router_load_balancing_type =
      config::OneOrMore(std::vector{RouterBalancing::seq_aux_loss, RouterBalancing::aux_loss});
  model.moe_aux_loss_coeff = config::OneOrMore(std::vector{0.25, 0.5});
  const auto written = capstan::json_of(write_hf_config(model, DType::f32).text);
  CHECK(written["seq_aux"] == false);
  CHECK(written["aux_loss_alpha"] == 0.75);
}

TEST_CASE("a tied model that brings a head of its own is refused when its weights are read") {
  for (const bool differs : {false, true}) {
    Copy copy("smollm2");
    HfDirectory before(kFamilies / "smollm2");
    std::map<std::string, std::vector<std::byte>> bytes;
    for (const std::string& name : before.names()) bytes[name] = bytes_of(before, name);
    const std::string embedding = "model.embed_tokens.weight";
    bytes["lm_head.weight"] = bytes[embedding];
    if (differs) bytes["lm_head.weight"].back() ^= std::byte{1};
    std::vector<checkpoint::SafetensorsTensor> tensors;
    for (const auto& entry : bytes) {
      const auto& info = before.at(entry.first == "lm_head.weight" ? embedding : entry.first);
      tensors.push_back({entry.first, info.dtype, info.shape, checkpoint::source_of(entry.second)});
    }
    fs::remove(copy.path / "model.safetensors");
    checkpoint::write_safetensors(checkpoint::real_file_system(), copy.path / "model.safetensors", tensors,
                                  {});
    // Does not read the weights.
    const auto model = ExternalModel::open("hf:" + copy.path.string());
    CHECK(model->model().share_embeddings_and_output_weights);
    const std::string said = error_of([&] { model->parameters(model->model()); });
    if (differs)
      CHECK(holds(said, "\"lm_head.weight\" differs from \"model.embed_tokens.weight\""));
    else
      CHECK(said.empty());
  }
}

TEST_CASE("directories that are not what they should be") {
  {
    Copy copy("smollm2");
    fs::remove(copy.path / "model.safetensors");
    CHECK(holds(copy.error(), "has neither model.safetensors"));
    write(copy.path / "pytorch_model.bin", "\x80\x02}q");
    CHECK(holds(copy.error(), "`pytorch_model.bin`"));
    CHECK(holds(copy.error(), "none is ever run"));
  }
  {
    Copy copy("llama_sharded");
    const fs::path index = copy.path / kIndexFile;
    const std::string shard = "\"model.norm.weight\": \"model-00003-of-00003.safetensors\"";
    std::string text = read_file(index);
    if (text.find(shard) == std::string::npos) FAIL("the fixture has changed");
    const auto with = [&](const std::string& value) {
      std::string changed = text;
      changed.replace(changed.find(shard), shard.size(), "\"model.norm.weight\": " + value);
      write(index, changed);
      return copy.error();
    };
    for (const char* value : {"\"../model.safetensors\"", "\"/etc/passwd\"", "\"a/b.safetensors\"",
                              "\".hidden.safetensors\"", "\"\"", "\"model\\u0000.safetensors\""})
      CHECK(holds(with(value), "not a plain file name"));
    CHECK(holds(with("\"model-00003-of-00003.bin\""), "not a safetensors file"));
    CHECK(holds(with("3"), "is not a string"));
    CHECK(holds(with("\"model-00009-of-00003.safetensors\""), "model-00009-of-00003.safetensors"));
    CHECK(holds(with("\"model-00001-of-00003.safetensors\""), "model.norm.weight"));
    CHECK(
        holds(with(shard.substr(shard.find(": ") + 2) + ", \"ghost\": \"model-00001-of-00003.safetensors\""),
              "\"ghost\""));
    write(index, text);
    fs::rename(copy.path / "model-00003-of-00003.safetensors", copy.home.path() / "outside.safetensors");
    CHECK(holds(copy.error(), "not found: "));
    fs::create_symlink(copy.home.path() / "outside.safetensors",
                       copy.path / "model-00003-of-00003.safetensors");
    CHECK(holds(copy.error(), "leads out"));
  }
  {
    Copy copy("smollm2");
    fs::remove(copy.path / "config.json");
    CHECK(holds(copy.error(), "not found: "));
    fs::create_directory(copy.path / "config.json");
    CHECK(holds(copy.error(), "config.json` is a directory, not a file"));
  }
  CHECK(holds(error_of([] { ExternalModel::open("hf:/nonexistent/model"); }), "not found: "));
  CHECK(holds(error_of([] { ExternalModel::open("hf:"); }), "names nothing"));
}

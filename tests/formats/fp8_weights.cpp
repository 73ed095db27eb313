// Weights in FP8 with a factor for each block of 128 x 128, as DeepSeek's releases hold them.
#include "formats/fp8_weights.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/reader.hpp"
#include "config/resolve/resolve.hpp"
#include "formats/convert.hpp"
#include "formats/hf_directory.hpp"
#include "models/registry.hpp"
#include "tensor/float8.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::formats;
using test::error_of;
using test::holds;
namespace fs = std::filesystem;

namespace {

struct StoredTensor {
  checkpoint::TensorInfo info;
  std::vector<std::byte> bytes;
};
using TensorFiles = std::map<std::string, StoredTensor>;

template <class T>
StoredTensor stored_tensor(DType type, const Shape& shape, const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {{type, shape}, {bytes.begin(), bytes.end()}};
}

// Capstan itself writes no codes.
void write_files(const TensorFiles& files, const fs::path& path) {
  OrderedJson header;
  std::string data;
  for (const auto& [name, tensor] : files) {
    const bool codes = tensor.info.dtype == DType::f8e4m3;
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    OrderedJson shape = OrderedJson::array();
    for (const int64_t size : tensor.info.shape) shape.push_back(size);
    header[name] = {{"dtype", codes                              ? "F8_E4M3"
                              : tensor.info.dtype == DType::bf16 ? "BF16"
                                                                 : "F32"},
                    {"shape", shape},
                    {"data_offsets", OrderedJson::array({begin, data.size()})}};
  }
  const std::string text = dump_json(header);
  const uint64_t length = text.size();
  std::ofstream(path, std::ios::binary)
      << std::string_view(reinterpret_cast<const char*>(&length), sizeof length) << text << data;
}

// Codes and factors of a matrix; adds them to `files` and returns the values that they stand for.
std::vector<float> add_quantized(TensorFiles& files, const std::string& name, const Shape& shape,
                                 const std::function<float(int64_t)>& value) {
  const int64_t rows = shape[0], columns = shape[1], across = (columns + 127) / 128;
  std::vector<float> scales(static_cast<size_t>((rows + 127) / 128 * across)), values;
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.001f + 0.0007f * static_cast<float>(i);
  std::vector<uint8_t> codes;
  for (int64_t i = 0; i < rows * columns; ++i) {
    const float scale = scales[static_cast<size_t>(i / columns / 128 * across + i % columns / 128)];
    codes.push_back(static_cast<uint8_t>(encode<kE4m3>(value(i) / scale)));
    values.push_back(static_cast<float>(bf16(decode<kE4m3>(codes.back()) * scale)));
  }
  files[name] = stored_tensor(DType::f8e4m3, shape, codes);
  files[name + "_scale_inv"] = stored_tensor(DType::f32, {(rows + 127) / 128, across}, scales);
  return values;
}

float noise(int64_t i) {
  return 0.3f * static_cast<float>((i * 7919 % 2003) - 1001) / 1001;
}

// The tensors of the fixture, with a layer for multi-token prediction, and the directory that holds them.
const fs::path kDeepseekV3 = test::kFormatFixtures / "families/deepseek_v3_moe";
const std::string kMtpLayer = "model.layers.3.";
TensorFiles tensors_with_mtp() {
  TensorFiles files;
  HfDirectory plain(kDeepseekV3);
  for (const std::string& name : plain.names())
    files[name] = stored_tensor(DType::f32, plain.at(name).shape, test::floats(plain, name));
  // Layers are 0 to 2. The layer of kind 2 with other values.
  const std::string last = "model.layers.2.";
  const auto add = [&](const std::string& name, const Shape& shape, float first) {
    std::vector<float> values(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i % 251);
    files[kMtpLayer + name] = stored_tensor(DType::f32, shape, values);
  };
  for (const std::string& name : plain.names())
    if (name.starts_with(last)) add(name.substr(last.size()), plain.at(name).shape, 0.25f);
  add("enorm.weight", {24}, 1), add("hnorm.weight", {24}, 2), add("shared_head.norm.weight", {24}, 3);
  add("eh_proj.weight", {24, 48}, 4);
  files[kMtpLayer + "embed_tokens.weight"] = files.at("model.embed_tokens.weight");
  files[kMtpLayer + "shared_head.head.weight"] = files.at("lm_head.weight");
  return files;
}
void write_model(const TensorFiles& files, const fs::path& directory, const std::string& config) {
  fs::create_directory(directory);
  write_files(files, directory / kSingleFile);
  std::ofstream(directory / "config.json") << config;
}

// A model that was converted to a checkpoint, and this checkpoint as a model.
struct RoundTrip {
  config::ModelConfig model;
  std::string left_out;
};
RoundTrip convert_and_back(const fs::path& from, const fs::path& home) {
  fs::remove_all(home / "checkpoint"), fs::remove_all(home / "back");
  const auto external = ExternalModel::open("hf:" + from.string());
  RoundTrip result;
  result.left_out = write_checkpoint(*external, home / "checkpoint", {}).note;
  auto reader = checkpoint::Reader::open(home / "checkpoint", checkpoint::Verification::content);
  config::Request request;
  request.recipe = (home / "checkpoint/recipe.yaml").string();
  const config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  result.model = resolution.config.model;
  write_hf(test::exported_of(reader, result.model), home / "back");
  return result;
}

// Compares names, types, shapes and bytes.
void check_same_tensors(const fs::path& first, const fs::path& second) {
  HfDirectory a(first), b(second);
  REQUIRE(a.names() == b.names());
  for (const std::string& name : a.names()) {
    CAPTURE(name);
    CHECK(a.at(name).dtype == b.at(name).dtype);
    CHECK(a.at(name).shape == b.at(name).shape);
    CHECK(test::floats(a, name) == test::floats(b, name));
  }
}

}  // namespace

TEST_CASE("codes times the factors of their blocks, rounded to bf16; any region of them") {
  const test::TemporaryDirectory home;
  TensorFiles files;
  const Shape shape{261, 300};
  const std::vector<float> expected = add_quantized(files, "a.weight", shape, noise);
  files["norm.weight"] = stored_tensor(DType::f32, {3}, std::vector<float>{1, 2, 3});
  write_files(files, home.path() / kSingleFile);
  HfDirectory directory(home.path());
  Fp8Weights weights(directory);
  CHECK(weights.names() == std::vector<std::string>{"a.weight", "norm.weight"});
  CHECK(weights.at("a.weight").dtype == DType::bf16);
  CHECK(test::floats(weights, "a.weight") == expected);
  CHECK(test::floats(weights, "norm.weight") == std::vector<float>{1, 2, 3});
  for (const Region& region :
       {Region{{0, 0}, {1, 300}}, Region{{127, 126}, {3, 5}}, Region{{200, 255}, {61, 45}},
        Region{{128, 128}, {128, 128}}, Region{{260, 299}, {1, 1}}}) {
    std::vector<float> part(static_cast<size_t>(region.sizes.elements())), wanted;
    weights.read("a.weight", DType::f32, region, std::as_writable_bytes(std::span(part)));
    for (int64_t r = 0; r < region.sizes[0]; ++r)
      for (int64_t c = 0; c < region.sizes[1]; ++c)
        wanted.push_back(
            expected[static_cast<size_t>((region.offsets[0] + r) * 300 + region.offsets[1] + c)]);
    CHECK(part == wanted);
  }
  std::vector<bf16> same(expected.size());
  weights.read_all("a.weight", DType::bf16, std::as_writable_bytes(std::span(same)));
  for (size_t i = 0; i < same.size(); ++i) REQUIRE(static_cast<float>(same[i]) == expected[i]);
}

TEST_CASE("factors that do not fit their weights are refused") {
  const test::TemporaryDirectory home;
  TensorFiles files;
  add_quantized(files, "a.weight", {130, 128}, noise);
  const auto refused = [&] {
    write_files(files, home.path() / kSingleFile);
    HfDirectory directory(home.path());
    return error_of([&] { Fp8Weights weights(directory); });
  };
  CHECK(refused().empty());
  files["a.weight_scale_inv"] = stored_tensor(DType::f32, {1, 2}, std::vector<float>{1, 1});
  CHECK(holds(refused(), "\"a.weight_scale_inv\" is [1,2] in fp32"));
  files["a.weight_scale_inv"] = stored_tensor(DType::bf16, {2, 1}, std::vector<bf16>(2));
  CHECK(holds(refused(), "need [2,1] in fp32"));
  // Without factors the codes mean nothing.
  files.erase("a.weight_scale_inv");
  CHECK(refused().empty());
  HfDirectory directory(home.path());
  Fp8Weights weights(directory);
  CHECK(holds(error_of([&] { test::floats(weights, "a.weight"); }), "F8_E4M3"));
}

TEST_CASE("layers for multi-token prediction are read where the recipe has them, and written with copies") {
  const test::TemporaryDirectory home;
  const fs::path &from = kDeepseekV3, to = home.path() / "mtp";
  write_model(tensors_with_mtp(), to, read_file(from / "config.json"));

  const auto external = ExternalModel::open("hf:" + to.string());
  config::ModelConfig model = external->model();
  CHECK_FALSE(model.mtp_num_layers);
  CHECK_FALSE(external->parameters(model)->find("mtp.layers.0.eh_proj.weight"));
  model.mtp_num_layers = 1;
  const auto read = external->parameters(model);
  CHECK(test::floats(*read, "mtp.layers.0.enorm.weight")[0] == 1);
  CHECK(test::floats(*read, "mtp.layers.0.hnorm.weight")[0] == 2);
  CHECK(test::floats(*read, "mtp.layers.0.final_layernorm.weight")[0] == 3);
  CHECK(test::floats(*read, "mtp.layers.0.eh_proj.weight")[1] == 5);
  CHECK(test::floats(*read, "mtp.layers.0.transformer_layer.mlp.router.weight")[2] == 2.25f);
  // The parameters of the model are those that are read.
  const auto built = models::build(model);
  for (const auto& parameter : built->parameters()) CHECK(read->find(parameter->name()));

  write_hf({read.get(), model, {}}, home.path() / "back", {});
  HfDirectory back(home.path() / "back");
  HfDirectory given(to);
  CHECK(back.names() == given.names());
  for (const std::string& name : given.names()) CHECK(test::floats(back, name) == test::floats(given, name));
  CHECK(json_of(back.read_text("config.json")).at("num_nextn_predict_layers") == 1);
  // A file without the layer is not one of a model with it.
  const auto without = ExternalModel::open("hf:" + from.string());
  CHECK(holds(error_of([&] { without->parameters(model); }), "model.layers.3.enorm.weight"));
  // What the recipe has to say instead.
  const auto help_of = [](ExternalModel& files, const config::ModelConfig& asked) -> std::string {
    try {
      files.parameters(asked);
    } catch (const Error& error) {
      return error.help();
    }
    return {};
  };
  CHECK(
      holds(help_of(*without, model), "no layer for multi-token prediction: set model.mtp_num_layers=null"));
  config::ModelConfig two = model;
  two.mtp_num_layers = 2;
  CHECK(holds(help_of(*external, two), "1 layer for multi-token prediction: set model.mtp_num_layers=1"));
  // No other family has such layers.
  const auto llama = ExternalModel::open("hf:" + (test::kFormatFixtures / "families/llama").string());
  config::ModelConfig other = llama->model();
  other.mtp_num_layers = 1;
  CHECK(holds(error_of([&] { llama->parameters(other); }), "layers of multi-token prediction"));
}

TEST_CASE("a conversion keeps layers for multi-token prediction, and the way back gives the same files") {
  const test::TemporaryDirectory home;
  const fs::path to = home.path() / "mtp";
  const std::string config = read_file(kDeepseekV3 / "config.json");
  const auto with_layers = [&](const Json& count) {
    OrderedJson changed = ordered_json_of(config);
    changed["num_nextn_predict_layers"] = count;
    return dump_json(changed, 2) + "\n";
  };
  TensorFiles files = tensors_with_mtp();
  write_model(files, to, config);
  RoundTrip trip = convert_and_back(to, home.path());
  CHECK(trip.model.mtp_num_layers == 1);
  CHECK(trip.left_out.empty());
  check_same_tensors(home.path() / "back", to);
  CHECK(read_file(home.path() / "back/config.json") == config);
  // The order of the tensors in the file is the writer's own from here on.
  fs::rename(home.path() / "back", home.path() / "first");
  convert_and_back(home.path() / "first", home.path());
  for (const auto& entry : fs::directory_iterator(home.path() / "first"))
    CHECK(read_file(entry.path()) == read_file(home.path() / "back" / entry.path().filename()));

  // A missing key stands for one layer, as in the class.
  OrderedJson without_key = ordered_json_of(config);
  without_key.erase("num_nextn_predict_layers");
  write_model(files, to, dump_json(without_key, 2));
  CHECK(convert_and_back(to, home.path()).model.mtp_num_layers == 1);
  check_same_tensors(home.path() / "back", to);
  CHECK(read_file(home.path() / "back/config.json") == dump_json(without_key, 2));

  // Layers that config.json does not name, and layers that the files do not have.
  write_model(files, to, with_layers(0));
  trip = convert_and_back(to, home.path());
  CHECK_FALSE(trip.model.mtp_num_layers);
  CHECK(holds(trip.left_out, "`num_nextn_predict_layers` is 0"));
  CHECK(holds(trip.left_out, "\"" + kMtpLayer));
  check_same_tensors(home.path() / "back", kDeepseekV3);
  write_model(files, to, with_layers(2));
  trip = convert_and_back(to, home.path());
  CHECK(trip.model.mtp_num_layers == 1);
  CHECK(holds(trip.left_out, "1 layer for multi-token prediction left out"));
  CHECK(read_file(home.path() / "back/config.json") == with_layers(1));

  write_model(files, to, with_layers("one"));
  CHECK(holds(error_of([&] { ExternalModel::open("hf:" + to.string()); }), "num_nextn_predict_layers"));
}

TEST_CASE("layers for multi-token prediction that a model cannot hold are left out, and config.json has 0") {
  const test::TemporaryDirectory home;
  const fs::path to = home.path() / "mtp";
  const std::string config = read_file(kDeepseekV3 / "config.json");
  const auto left_out = [&](const TensorFiles& files) {
    write_model(files, to, config);
    const RoundTrip trip = convert_and_back(to, home.path());
    CHECK_FALSE(trip.model.mtp_num_layers);
    check_same_tensors(home.path() / "back", kDeepseekV3);
    OrderedJson expected = ordered_json_of(config);
    expected["num_nextn_predict_layers"] = 0;
    CHECK(read_file(home.path() / "back/config.json") == dump_json(expected, 2) + "\n");
    // The result is a model without such layers.
    fs::rename(home.path() / "back", home.path() / "again");
    CHECK(convert_and_back(home.path() / "again", home.path()).left_out.empty());
    fs::remove_all(home.path() / "again");
    return trip.left_out;
  };
  TensorFiles files = tensors_with_mtp();
  files.erase(kMtpLayer + "hnorm.weight");
  CHECK(holds(left_out(files), "\"" + kMtpLayer + "hnorm.weight\" is missing"));
  files[kMtpLayer + "hnorm.weight"] = stored_tensor(DType::f32, {3}, std::vector<float>{1, 2, 3});
  CHECK(holds(left_out(files), "hnorm.weight\" is [3] and should be [24]"));
  // A model has one embedding and one head.
  for (const char* copy : {"embed_tokens.weight", "shared_head.head.weight"}) {
    files = tensors_with_mtp();
    files.at(kMtpLayer + copy).bytes.back() ^= std::byte{1};
    CHECK(holds(left_out(files), kMtpLayer + copy + "\" differs from"));
  }
  files = tensors_with_mtp();
  std::erase_if(files, [](const auto& file) { return file.first.starts_with(kMtpLayer); });
  CHECK(holds(left_out(files), "is missing"));

  // An export of a run that has left the layers out, whose checkpoint has the config.json of its weights.
  write_model(tensors_with_mtp(), to, config);
  const auto external = ExternalModel::open("hf:" + to.string());
  CHECK(external->prediction_layers().count == 1);
  const auto read = external->parameters(external->model());
  write_hf({read.get(), external->model(), external->assets()}, home.path() / "export");
  check_same_tensors(home.path() / "export", kDeepseekV3);
  CHECK(json_of(read_file(home.path() / "export/config.json")).at("num_nextn_predict_layers") == 0);
  // Likewise where config.json is written anew.
  write_hf({read.get(), external->model(), {}}, home.path() / "anew");
  CHECK(json_of(read_file(home.path() / "anew/config.json")).at("num_nextn_predict_layers") == 0);
}

TEST_CASE("a model in FP8 with a layer for multi-token prediction is imported, and exported in bf16") {
  const test::TemporaryDirectory home;
  const fs::path from = test::kFormatFixtures / "families/deepseek_v3_moe", to = home.path() / "fp8";
  fs::create_directory(to);
  TensorFiles files;
  HfDirectory plain(from);
  std::map<std::string, std::vector<float>> expected;
  for (const std::string& name : plain.names()) {
    const auto values = test::floats(plain, name);
    if (name.ends_with("_proj.weight"))
      expected[name] = add_quantized(files, name, plain.at(name).shape,
                                     [&](int64_t i) { return values[static_cast<size_t>(i)]; });
    else
      files[name] = stored_tensor(DType::f32, plain.at(name).shape, values);
  }
  // Layers are 0 to 2.
  add_quantized(files, "model.layers.3.eh_proj.weight", {24, 48}, noise);
  files["model.layers.3.enorm.weight"] = stored_tensor(DType::f32, {24}, std::vector<float>(24, 1.0f));
  write_files(files, to / kSingleFile);
  Json config = json_of(read_file(from / "config.json"));
  const auto write_config = [&] { std::ofstream(to / "config.json") << dump_json(config); };
  config["quantization_config"] = {{"quant_method", "fp8"},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", "dynamic"},
                                   {"weight_block_size", {128, 128}}};
  write_config();

  const auto external = ExternalModel::open("hf:" + to.string());
  CHECK(external->dtype() == DType::bf16);
  const WriteResult in = write_checkpoint(*external, home.path() / "checkpoint", DType::bf16);
  CHECK(holds(in.note, "is missing"));
  auto reader = checkpoint::Reader::open(home.path() / "checkpoint", checkpoint::Verification::content);
  CHECK(reader.find("decoder.layers.1.mlp.router.expert_bias")->dtype == DType::f32);
  CHECK(reader.find("decoder.layers.1.mlp.router.weight")->dtype == DType::bf16);
  HfOptions options;
  options.dtype = DType::bf16;
  write_hf(test::exported_of(reader, external->model()), home.path() / "back", options);
  HfDirectory back(home.path() / "back");
  CHECK(back.names() == plain.names());
  CHECK_FALSE(json_of(back.read_text("config.json")).contains("quantization_config"));
  for (const auto& [name, values] : expected) {
    CAPTURE(name);
    CHECK(back.at(name).dtype == DType::bf16);
    CHECK(test::floats(back, name) == values);
  }
  const std::string bias = "model.layers.2.mlp.gate.e_score_correction_bias";
  CHECK(back.at(bias).dtype == DType::f32);
  CHECK(test::floats(back, bias) == test::floats(plain, bias));

  for (const auto& [key, value] : {std::pair<const char*, Json>{"quant_method", "gptq"},
                                   {"fmt", "e5m2"},
                                   {"weight_block_size", Json::array({64, 64})},
                                   {"bits", 4}}) {
    const Json before = config;
    config["quantization_config"][key] = value;
    write_config();
    CHECK(holds(error_of([&] { ExternalModel::open("hf:" + to.string()); }), key));
    config = before;
  }
}

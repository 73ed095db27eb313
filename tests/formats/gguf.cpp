// Tests GGUF against the reference implementation (make_gguf.py), and with files that Capstan wrote and
// malformed files.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "formats/convert.hpp"
#include "formats/gguf_arch.hpp"
#include "formats/gguf_file.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/fixture.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::formats;
using test::error_of;
using test::floats;
using test::holds;
using test::kFormatFixtures;
namespace fs = std::filesystem;

namespace {

// Builds a file by hand.
struct Bytes {
  std::string text;
  template <class T>
  Bytes& put(T value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& put_text(const std::string& value) {
    put<uint64_t>(value.size());
    text += value;
    return *this;
  }
  std::string error() const {
    return error_of([&] { parse_gguf(std::as_bytes(std::span(text.data(), text.size())), "file"); });
  }
};
Bytes head(uint64_t tensors, uint64_t keys, uint32_t version = 3) {
  Bytes b;
  b.text = "GGUF";
  return b.put(version).put(tensors).put(keys);
}
Bytes tensor(Bytes b, const std::string& name, std::vector<uint64_t> sizes, uint32_t type, uint64_t offset) {
  b.put_text(name).put(static_cast<uint32_t>(sizes.size()));
  for (const uint64_t size : sizes) b.put(size);
  return b.put(type).put(offset);
}

// A family's fixture as a GGUF file in fp32, with the expected content.
struct AsGguf {
  std::unique_ptr<ExternalModel> hf;
  config::ModelConfig model;
  std::unique_ptr<checkpoint::TensorSource> parameters;
  AsGguf(const std::string& name, const fs::path& to)
      : hf(ExternalModel::open("hf:" + (kFormatFixtures / "families" / name).string())), model(hf->model()) {
    // A GGUF file cannot express the scale and window of these fixtures.
    if (name == "gemma2") model.softmax_scale = 1 / std::sqrt(static_cast<double>(*model.kv_channels));
    if (name == "mistral") model.window_size.reset();
    // Readers know this limit only.
    if (name == "gpt_oss") model.activation_func_clamp_value = 7;
    parameters = hf->parameters(model);
    write_gguf({parameters.get(), model, hf->assets()}, to, GgufType::f32);
  }
};

// Fields that a file has in fp32.
const std::set<std::string> kInFp32 = {"model.layernorm_epsilon", "model.rope_scaling_beta_slow"};

using Entries = std::vector<std::pair<std::string, GgufValue>>;
// Replaces a file's header and keeps its data.
void edit(const fs::path& path, const std::function<void(Entries&, std::vector<GgufTensor>&)>& change) {
  const std::string text = read_file(path);
  GgufHeader header = parse_gguf(std::as_bytes(std::span(text.data(), text.size())), "file");
  Entries metadata(header.metadata.begin(), header.metadata.end());
  change(metadata, header.tensors);
  std::ofstream(path, std::ios::binary)
      << gguf_header(metadata, header.tensors) + text.substr(header.data_begin);
}

}  // namespace

TEST_CASE("blocks of every type are dequantized as the reference does, in any region") {
  const test::Fixture expected((kFormatFixtures / "gguf/blocks.safetensors").string());
  GgufFile file(kFormatFixtures / "gguf/blocks.gguf");
  for (const std::string& name : expected.names("")) {
    CAPTURE(name);
    const auto truth = expected.get<float>(name);
    CHECK(floats(file, name) == truth);
    const auto& shape = file.at(name).shape;
    const Region part{{1, 7}, {2, 40}};
    std::vector<float> got(80), wanted(80);
    file.read(name, DType::f32, part, std::as_writable_bytes(std::span(got)));
    copy_region(part, full_region(shape), reinterpret_cast<const std::byte*>(truth.data()), DType::f32, part,
                reinterpret_cast<std::byte*>(wanted.data()), DType::f32);
    CHECK(got == wanted);
  }
}

TEST_CASE("regions of quantized tensors of three dimensions are those of the full tensor") {
  GgufFile file(kFormatFixtures / "gguf/gpt_oss.gguf");
  const std::string name = "blk.1.ffn_down_exps.weight";
  REQUIRE(file.at(name).shape == Shape{3, 32, 64});
  const std::vector<float> all = floats(file, name);
  for (const Region& part :
       {Region{{1, 3, 5}, {2, 7, 40}}, {{0, 31, 63}, {3, 1, 1}}, {{2, 0, 32}, {1, 32, 32}}}) {
    std::vector<float> got(static_cast<size_t>(part.sizes.elements()));
    file.read(name, DType::f32, part, std::as_writable_bytes(std::span(got)));
    size_t i = 0;
    for (int64_t e = 0; e < part.sizes[0]; ++e)
      for (int64_t r = 0; r < part.sizes[1]; ++r)
        for (int64_t c = 0; c < part.sizes[2]; ++c, ++i)
          REQUIRE(got[i] == all[static_cast<size_t>(((part.offsets[0] + e) * 32 + part.offsets[1] + r) * 64 +
                                                    part.offsets[2] + c)]);
  }
}

TEST_CASE("a file of llama.cpp's converter is the model it was made from, tokenizer included") {
  const auto gguf = ExternalModel::open("gguf:" + (kFormatFixtures / "gguf/smollm2.gguf").string());
  const auto hf = ExternalModel::open("hf:" + (kFormatFixtures / "families/smollm2").string());
  for (const Difference& one : differences(gguf->model(), hf->model())) {
    CAPTURE(one.path + ": " + one.first + ", " + one.second);
    CHECK(one.path == "model.layernorm_epsilon");  // fp32 there
  }
  const auto a = gguf->parameters(gguf->model()), b = hf->parameters(hf->model());
  CHECK(a->names() == b->names());
  for (const std::string& name : a->names()) {
    CAPTURE(name);
    CHECK(floats(*a, name) == floats(*b, name));
  }
  using nlohmann::json;
  const auto tokenizer = [](const ExternalModel& model) {
    for (const auto& [name, text] : model.assets())
      if (name == "tokenizer.json") return capstan::json_of(text);
    return json();
  };
  const json ours = tokenizer(*gguf), theirs = tokenizer(*hf);
  CHECK(ours["model"]["vocab"] == theirs["model"]["vocab"]);
  CHECK(ours["model"]["merges"] == theirs["model"]["merges"]);
  CHECK(ours["added_tokens"].size() == theirs["added_tokens"].size());
}

TEST_CASE("a file of gpt-oss with experts in MXFP4 is the model it was made from") {
  const auto gguf = ExternalModel::open("gguf:" + (kFormatFixtures / "gguf/gpt_oss.gguf").string());
  const auto hf = ExternalModel::open("hf:" + (kFormatFixtures / "quantized/gpt_oss_mxfp4").string());
  for (const Difference& one : differences(gguf->model(), hf->model())) {
    CAPTURE(one.path + ": " + one.first + ", " + one.second);
    CHECK(kInFp32.contains(one.path));
  }
  CHECK(gguf->model().rope_scaling_beta_slow == static_cast<double>(0.3f));
  CHECK(gguf->model().moe_aux_loss_coeff.items == std::vector<double>{0});
  const auto a = gguf->parameters(gguf->model()), b = hf->parameters(hf->model());
  CHECK(a->names() == b->names());
  for (const std::string& name : a->names()) {
    CAPTURE(name);
    CHECK(a->at(name).shape == b->at(name).shape);
    CHECK(floats(*a, name) == floats(*b, name));
  }
}

TEST_CASE("a file of gpt-oss has the types that llama.cpp's readers need") {
  test::TemporaryDirectory home;
  const fs::path path = home.path() / "model.gguf";
  const AsGguf written("gpt_oss", path);
  write_gguf({written.parameters.get(), written.model, {}}, home.path() / "half.gguf", GgufType::bf16);
  GgufFile file(home.path() / "half.gguf");
  for (const auto& [name, type] : {std::pair("blk.0.ffn_gate_inp.weight", DType::f32),
                                   {"blk.1.ffn_gate_exps.bias", DType::f32},
                                   {"blk.1.attn_sinks.weight", DType::f32},
                                   {"blk.2.post_attention_norm.weight", DType::f32},
                                   {"blk.2.ffn_down_exps.weight", DType::bf16},
                                   {"blk.0.attn_q.weight", DType::bf16}}) {
    CAPTURE(name);
    REQUIRE(file.find(name));
    CHECK(file.at(name).dtype == type);
  }
  CHECK(file.at("blk.0.ffn_up_exps.weight").shape == Shape{5, 14, 24});
  for (const auto& [key, value] : {std::pair("expert_count", 5),
                                   {"expert_used_count", 2},
                                   {"expert_feed_forward_length", 14},
                                   {"attention.sliding_window", 5},
                                   {"rope.scaling.original_context_length", 16}}) {
    CAPTURE(key);
    CHECK(file.metadata().at(std::string("gpt-oss.") + key).integer == value);
  }
}

TEST_CASE("a model that readers of gpt-oss would compute otherwise is refused with what they have") {
  test::TemporaryDirectory home;
  const config::ModelConfig model = AsGguf("gpt_oss", home.path() / "model.gguf").model;
  const auto refused = [&](auto change) {
    config::ModelConfig other = model;
    change(other);
    return error_of([&] { plan_gguf(other); });
  };
  CHECK(refused([](auto&) {}).empty());
  CHECK(holds(refused([](auto& m) { m.activation_func_clamp_value = 0.4; }),
              "model.activation_func_clamp_value=0.4 (gpt-oss has 7)"));
  CHECK(holds(refused([](auto& m) { m.activation_func = config::Activation::silu; }),
              "model.activation_func=silu (gpt-oss has quick_gelu)"));
  CHECK(
      holds(refused([](auto& m) { m.moe_router_pre_softmax = true; }), "model.moe_router_pre_softmax=true"));
  CHECK(holds(refused([](auto& m) { m.qk_layernorm = true; }), "model.qk_layernorm=true"));
  CHECK(holds(refused([](auto& m) { m.moe_first_dense_layers = 1; }), "model.moe_first_dense_layers=1"));
  CHECK(holds(refused([](auto& m) { m.rope_scaling_truncate = true; }), "model.rope_scaling_truncate=true"));
  CHECK(holds(refused([](auto& m) { m.share_embeddings_and_output_weights = true; }),
              "model.share_embeddings_and_output_weights=true"));
  CHECK(holds(refused([](auto& m) { m.add_attention_output_bias = false; }),
              "model.add_attention_output_bias=false"));

  // A file whose numbers do not fit its tensors.
  const auto broken = [&](const char* key, int64_t value) {
    const fs::path path = home.path() / (std::string(key) + ".gguf");
    const AsGguf written("gpt_oss", path);
    edit(path, [&](auto& metadata, auto&) {
      for (auto& [name, given] : metadata)
        if (name == std::string("gpt-oss.") + key) given = gguf_integer(value);
    });
    return error_of([&] { ExternalModel::open("gguf:" + path.string()); });
  };
  CHECK(holds(broken("expert_count", 1 << 20),
              "its keys describe 1048576 experts, but tensor \"blk.0.ffn_gate_exps.weight\" is [5,14,24]"));
  CHECK(holds(broken("expert_used_count", 6), "`gpt-oss.expert_used_count` is more than `expert_count`"));
  const fs::path path = home.path() / "width.gguf";
  const AsGguf written("gpt_oss", path);
  edit(path, [&](auto& metadata, auto&) {
    for (auto& [name, given] : metadata)
      if (name == "gpt-oss.expert_feed_forward_length") given = gguf_integer(15);
  });
  CHECK(holds(error_of([&] {
                const auto wide = ExternalModel::open("gguf:" + path.string());
                wide->parameters(wide->model());
              }),
              "blk.0.ffn_down_exps.weight"));
}

TEST_CASE("a model written as GGUF reads back as the same model") {
  for (const char* name :
       {"gpt2", "llama", "smollm2", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gpt_oss"}) {
    CAPTURE(name);
    test::TemporaryDirectory home;
    const AsGguf written(name, home.path() / "model.gguf");
    const auto gguf = ExternalModel::open("gguf:" + (home.path() / "model.gguf").string());
    for (const Difference& one : differences(gguf->model(), written.model)) {
      CAPTURE(one.path + ": " + one.first + ", " + one.second);
      CHECK(kInFp32.contains(one.path));
    }
    const auto back = gguf->parameters(gguf->model());
    for (const std::string& tensor : written.parameters->names()) {
      CAPTURE(tensor);
      REQUIRE(back->find(tensor));
      const auto x = floats(*back, tensor), y = floats(*written.parameters, tensor);
      REQUIRE(x.size() == y.size());
      for (size_t i = 0; i < x.size(); ++i) REQUIRE(std::abs(x[i] - y[i]) <= 2e-7f);  // Gemma's gamma - 1 + 1
    }
    CHECK(holds(error_of([&] {
                  write_gguf({written.parameters.get(), written.model, {}}, home.path() / "model.gguf",
                             GgufType::f32);
                }),
                "exists already"));
  }
}

TEST_CASE("Gemma's gammas, to which a file adds 1, lose nothing on their way to a narrower type") {
  test::TemporaryDirectory home;
  const AsGguf written("gemma2", home.path() / "model.gguf");
  const auto gguf = ExternalModel::open("gguf:" + (home.path() / "model.gguf").string());
  const auto narrow = gguf->parameters(gguf->model());
  int count = 0;
  for (const std::string& tensor : written.parameters->names()) {
    if (tensor.find("layernorm") == std::string::npos) continue;
    CAPTURE(tensor);
    const auto truth = floats(*written.parameters, tensor);
    std::vector<bf16> got(truth.size());
    narrow->read_all(tensor, DType::bf16, std::as_writable_bytes(std::span(got)));
    // Half a step of bf16 at w, and one of fp32 at 1.
    for (size_t i = 0; i < truth.size(); ++i)
      CHECK(std::abs(static_cast<float>(got[i]) - truth[i]) <= std::abs(truth[i]) / 256 + 1.2e-7f);
    ++count;
  }
  CHECK(count == 4 * 2 + 1);
}

TEST_CASE("a file of Gemma 2 that leaves numbers out has those of the class") {
  test::TemporaryDirectory home;
  const fs::path path = home.path() / "model.gguf";
  const AsGguf written("gemma2", path);
  edit(path, [](auto& metadata, auto&) {
    std::erase_if(metadata, [](const auto& entry) {
      return entry.first.ends_with("sliding_window") || entry.first.ends_with("softcapping");
    });
  });
  const config::ModelConfig model = ExternalModel::open("gguf:" + path.string())->model();
  CHECK(model.window_size == 4096);
  CHECK(model.attn_logit_softcapping == 50);
  CHECK(model.final_logit_softcapping == 30);
}

TEST_CASE("factors of RoPE that are no vector of the right ones are refused") {
  test::TemporaryDirectory home;
  const fs::path path = home.path() / "model.gguf";
  const AsGguf written("llama", path);
  const auto error = [&] { return error_of([&] { ExternalModel::open("gguf:" + path.string()); }); };
  CHECK(error().empty());
  const auto reshape = [](Shape shape) {
    return [shape](auto&, std::vector<GgufTensor>& tensors) {
      REQUIRE(tensors.back().name == kRopeFactors);
      tensors.back().shape = shape;
    };
  };
  edit(path, reshape({1, 1, 3}));
  CHECK(holds(error(), "rope_freqs.weight\" is [1,1,3], and should be a vector"));
  edit(path, reshape({2}));
  CHECK(holds(error(), "not those of Llama 3.1's scaling"));
  edit(path, [](auto& metadata, auto&) {
    for (auto& [key, value] : metadata)
      if (key == "llama.rope.dimension_count") value.integer = 1 << 30;
  });
  CHECK(holds(error(), "`llama.rope.dimension_count` is not an even number"));
}

TEST_CASE("an architecture that is not read is refused with those that are") {
  test::TemporaryDirectory home;
  const fs::path path = home.path() / "model.gguf";
  const AsGguf written("smollm2", path);
  edit(path, [](auto& metadata, auto&) { metadata[0].second = gguf_text("phi3"); });
  const std::string said = error_of([&] { ExternalModel::open("gguf:" + path.string()); });
  CHECK(holds(
      said,
      "`general.architecture` is \"phi3\"; llama, qwen2, qwen3, gpt2, gemma2, olmo2, gpt-oss are read"));
}

TEST_CASE("F32, F16, BF16 and Q8_0 round to the bytes of the reference") {
  const test::Fixture expected((kFormatFixtures / "gguf/rounded.safetensors").string());
  const auto values = expected.get<float>("values");
  std::vector<std::byte> bytes;
  for (const uint32_t id : {kGgmlF32, kGgmlF16, kGgmlBf16, kGgmlQ8_0}) {
    const GgmlType& type = *find_ggml_type(id);
    CAPTURE(std::string(type.name));
    const auto wanted = expected.get<uint8_t>(std::string(type.name));
    quantize(type, values, bytes);
    REQUIRE(bytes.size() == wanted.size());
    for (size_t i = 0; i < bytes.size(); ++i) {
      CAPTURE(i);
      REQUIRE(std::to_integer<uint8_t>(bytes[i]) == wanted[i]);
    }
  }
}

TEST_CASE("numbers that a type cannot hold are refused, with the tensor") {
  const auto error = [](uint32_t id, float value) {
    std::vector<float> values(32, 0.5f);
    values[17] = value;
    std::vector<std::byte> bytes;
    return error_of([&] { quantize(*find_ggml_type(id), values, bytes); });
  };
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(holds(error(kGgmlQ8_0, nan), "Q8_0 cannot hold the value nan"));
  CHECK(holds(error(kGgmlQ8_0, -infinity), "Q8_0 cannot hold the value -inf"));
  CHECK(holds(error(kGgmlQ8_0, 1e7f), "Q8_0 cannot hold the value 1e+07"));
  CHECK(error(kGgmlQ8_0, 65504 * 127.0f).empty());
  CHECK(holds(error(kGgmlF16, -1e5f), "F16 cannot hold the value -1e+05"));
  CHECK(error(kGgmlF16, 65504).empty());
  CHECK(error(kGgmlF16, nan).empty());
  CHECK(error(kGgmlBf16, 3e38f).empty());
  // Values whose scale has no inverse in fp32 become zeros.
  const std::vector<float> tiny(32, 1e-40f);
  std::vector<std::byte> bytes;
  quantize(*find_ggml_type(kGgmlQ8_0), tiny, bytes);
  CHECK(bytes == std::vector<std::byte>(34));

  class Diverged final : public checkpoint::TensorSource {
   public:
    explicit Diverged(checkpoint::TensorSource& source) : source_(source) {}
    std::string description() const override { return source_.description(); }
    std::vector<std::string> names() const override { return source_.names(); }
    const checkpoint::TensorInfo* find(std::string_view name) const override { return source_.find(name); }
    void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override {
      source_.read(name, dtype, wanted, out);
      const float much = 1e9f;
      if (name == "decoder.layers.1.mlp.linear_fc2.weight") std::memcpy(out.data(), &much, sizeof much);
    }

   private:
    checkpoint::TensorSource& source_;
  };
  test::TemporaryDirectory home;
  const AsGguf written("smollm2", home.path() / "model.gguf");
  Diverged diverged(*written.parameters);
  CHECK(holds(error_of([&] {
                write_gguf({&diverged, written.model, {}}, home.path() / "other.gguf", GgufType::f16);
              }),
              "the tensor \"blk.1.ffn_down.weight\": F16 cannot hold the value 1e+09"));
  CHECK(!fs::exists(home.path() / "other.gguf"));
}

TEST_CASE("a GGUF file of an activation function that its architecture does not compute is refused by name") {
  test::TemporaryDirectory home;
  config::ModelConfig model = AsGguf("smollm2", home.path() / "model.gguf").model;
  model.activation_func = config::Activation::relu;
  CHECK(
      holds(error_of([&] { plan_gguf(model); }), "model.activation_func=relu (llama always computes silu)"));
  model = AsGguf("smollm2", home.path() / "again.gguf").model;
  model.apply_residual_connection_post_layernorm = true;
  CHECK(holds(error_of([&] { plan_gguf(model); }), "model.apply_residual_connection_post_layernorm"));
}

TEST_CASE("a malformed GGUF file is refused with the location") {
  CHECK(holds(Bytes{"GGML"}.error(), "offset 0: the file does not begin with `GGUF`"));
  CHECK(holds(head(0, 0, 2).error(), "version 2"));
  CHECK(head(0, 0).error().empty());
  CHECK(holds(head(0, uint64_t{1} << 60).error(), "do not fit"));
  CHECK(holds(head(uint64_t{1} << 60, 0).error(), "do not fit"));
  CHECK(holds(head(0, 1).put<uint64_t>(~uint64_t{0}).put<uint64_t>(0).error(), "a key of"));
  CHECK(holds(head(0, 1).put_text("k").put<uint32_t>(99).put<uint64_t>(0).error(), "unknown type 99"));
  CHECK(holds(
      head(0, 1).put_text("k").put<uint32_t>(9).put<uint32_t>(9).put<uint64_t>(1).put<uint64_t>(0).error(),
      "items of type 9"));
  CHECK(holds(
      head(0, 1).put_text("k").put<uint32_t>(9).put<uint32_t>(4).put<uint64_t>(uint64_t{1} << 61).error(),
      "do not fit"));
  CHECK(holds(
      head(0, 1).put_text("k").put<uint32_t>(8).put<uint64_t>(uint64_t{1} << 50).put<uint64_t>(0).error(),
      "a text of"));
  CHECK(holds(head(0, 1).put_text("k").put<uint32_t>(7).put<uint8_t>(2).put<uint64_t>(0).error(), "boolean"));
  CHECK(holds(head(0, 2)
                  .put_text("k")
                  .put<uint32_t>(4)
                  .put<uint32_t>(1)
                  .put_text("k")
                  .put<uint32_t>(4)
                  .put<uint32_t>(1)
                  .error(),
              "twice"));
  CHECK(holds(head(0, 1).put_text("general.alignment").put<uint32_t>(4).put<uint32_t>(24).error(),
              "power of two"));
  const std::string data(512, '\0');
  const auto with_data = [&](Bytes b) {
    b.text.resize((b.text.size() + 31) / 32 * 32);
    b.text += data;
    return b.error();
  };
  CHECK(with_data(tensor(head(1, 0), "t", {8, 4}, 0, 0)).empty());
  CHECK(holds(with_data(tensor(head(1, 0), "t", {1, 1, 1, 1, 1}, 0, 0)), "5 dimensions"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {}, 0, 0)), "0 dimensions"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {0}, 0, 0)), "a size of 0"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {uint64_t{1} << 40, uint64_t{1} << 40}, 0, 0)), "a size of"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {uint64_t{1} << 62}, 0, 0)), "too many bytes"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8}, 13, 0)), "Q5_K"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8}, 77, 0)), "type 77"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {33}, 8, 0)), "no multiple of 32"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8, 4}, 0, 16)), "0 is expected"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8, 400}, 0, 0)), "after the end of the file"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8}, 0, ~uint64_t{0} - 31)), "is expected"));
  CHECK(holds(with_data(tensor(tensor(head(2, 0), "t", {8}, 0, 0), "t", {8}, 0, 32)), "twice"));
  CHECK(holds(with_data(tensor(tensor(head(2, 0), "t", {8}, 0, 0), "u", {8}, 0, 0)), "32 is expected"));
  CHECK(holds(
      with_data(tensor(head(1, 1).put_text("split.count").put<uint32_t>(2).put<uint16_t>(3), "t", {8}, 0, 0)),
      "3 files of a split model"));
}

// GGUF: what gguf's own reference reads and writes (make_gguf.py), our files read back, and files that lie.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/file.hpp"
#include "interchange/convert.hpp"
#include "interchange/gguf_file.hpp"
#include "interchange/hf_directory.hpp"
#include "interchange/model_section.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/fixture.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::interchange;
using test::error_of;
using test::holds;
namespace fs = std::filesystem;

namespace {

const fs::path kHere = fs::path(CAPSTAN_SOURCE_DIR) / "tests/interchange";

std::vector<float> floats(checkpoint::TensorSource& source, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(checkpoint::element_count(source.at(name).shape)));
  source.read_whole(name, DType::f32, std::as_writable_bytes(std::span(values)));
  return values;
}

// A file by hand.
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

}  // namespace

TEST_CASE("blocks of every type are dequantised as the reference does, in any rectangle") {
  const test::Fixture expected((kHere / "gguf/blocks.safetensors").string());
  GgufFile file(kHere / "gguf/blocks.gguf");
  for (const std::string& name : expected.names("")) {
    CAPTURE(name);
    const auto truth = expected.get<float>(name);
    CHECK(floats(file, name) == truth);
    const auto& shape = file.at(name).shape;
    const checkpoint::Rectangle part{{1, 7}, {2, 40}};
    std::vector<float> got(80), wanted(80);
    file.read(name, DType::f32, part, std::as_writable_bytes(std::span(got)));
    checkpoint::copy_cells(part, checkpoint::whole(shape), reinterpret_cast<const std::byte*>(truth.data()),
                           DType::f32, part, reinterpret_cast<std::byte*>(wanted.data()), DType::f32);
    CHECK(got == wanted);
  }
}

TEST_CASE("a file of llama.cpp's converter is the model it was made from, tokenizer included") {
  const auto gguf = ForeignModel::open("gguf:" + (kHere / "gguf/smollm2.gguf").string());
  const auto hf = ForeignModel::open("hf:" + (kHere / "families/smollm2").string());
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
  const auto tokenizer = [](const ForeignModel& model) {
    for (const auto& [name, text] : model.carried())
      if (name == "tokenizer.json") return json::parse(text);
    return json();
  };
  const json ours = tokenizer(*gguf), theirs = tokenizer(*hf);
  CHECK(ours["model"]["vocab"] == theirs["model"]["vocab"]);
  CHECK(ours["model"]["merges"] == theirs["model"]["merges"]);
  CHECK(ours["added_tokens"].size() == theirs["added_tokens"].size());
}

TEST_CASE("what is written as GGUF reads back as the same model") {
  for (const char* name : {"gpt2", "llama", "smollm2", "qwen2", "qwen3", "olmo2", "gemma2"}) {
    CAPTURE(name);
    test::TemporaryDirectory home;
    const auto hf = ForeignModel::open("hf:" + (kHere / "families" / name).string());
    config::ModelConfig model = hf->model();
    // The fixture's own scale is none that a file can say.
    if (name == std::string("gemma2"))
      model.softmax_scale = 1 / std::sqrt(static_cast<double>(*model.kv_channels));
    const auto parameters = hf->parameters(model);
    write_gguf({parameters.get(), model, hf->carried()}, home.path() / "model.gguf", GgufType::f32);
    const auto gguf = ForeignModel::open("gguf:" + (home.path() / "model.gguf").string());
    for (const Difference& one : differences(gguf->model(), model)) {
      CAPTURE(one.path + ": " + one.first + ", " + one.second);
      // Those that the file has in fp32.
      CHECK((one.path == "model.layernorm_epsilon" ||
             one.path == "model.rope_scaling_original_max_position_embeddings" ||
             one.path == "model.add_mlp_bias"));
    }
    const auto back = gguf->parameters(gguf->model());
    for (const std::string& tensor : parameters->names()) {
      CAPTURE(tensor);
      REQUIRE(back->find(tensor));
      const auto x = floats(*back, tensor), y = floats(*parameters, tensor);
      REQUIRE(x.size() == y.size());
      for (size_t i = 0; i < x.size(); ++i) REQUIRE(std::abs(x[i] - y[i]) <= 2e-7f);  // Gemma's gamma - 1 + 1
    }
    CHECK(holds(error_of([&] {
                  write_gguf({parameters.get(), model, {}}, home.path() / "model.gguf", GgufType::f32);
                }),
                "exists already"));
  }
}

TEST_CASE("fp16, bf16 and Q8_0 round as the reference does") {
  GgufFile blocks(kHere / "gguf/blocks.gguf");
  const std::vector<float> values = floats(blocks, "F32");
  std::vector<std::byte> bytes;
  // The values of the other tensors are others: what is checked is that writing what was read gives the same blocks.
  for (const uint32_t type : {kGgmlF16, kGgmlBf16, kGgmlQ8_0}) {
    const GgmlType& ggml = *find_ggml_type(type);
    const std::vector<float> read = floats(blocks, std::string(ggml.name));
    quantise(ggml, read, bytes);
    std::vector<float> again(read.size());
    dequantise(ggml, bytes, again);
    for (size_t i = 0; i < read.size(); ++i)
      CHECK(std::abs(again[i] - read[i]) <= 1e-6f + 1e-3f * std::abs(read[i]));
  }
}

TEST_CASE("a GGUF file that lies is refused with the place") {
  CHECK(holds(Bytes{"GGML"}.error(), "does not begin with GGUF"));
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
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8, 4}, 0, 16)), "0 is next"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8, 400}, 0, 0)), "behind the file"));
  CHECK(holds(with_data(tensor(head(1, 0), "t", {8}, 0, ~uint64_t{0} - 31)), "is next"));
  CHECK(holds(with_data(tensor(tensor(head(2, 0), "t", {8}, 0, 0), "t", {8}, 0, 32)), "twice"));
  CHECK(holds(with_data(tensor(tensor(head(2, 0), "t", {8}, 0, 0), "u", {8}, 0, 0)), "32 is next"));
  CHECK(holds(
      with_data(tensor(head(1, 1).put_text("split.count").put<uint32_t>(2).put<uint16_t>(3), "t", {8}, 0, 0)),
      "3 pieces"));
}

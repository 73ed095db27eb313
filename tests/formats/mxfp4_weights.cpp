// Weights in MXFP4, as the releases of gpt-oss hold them.
#include "formats/mxfp4_weights.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "base/json.hpp"
#include "checkpoint/reader.hpp"
#include "formats/convert.hpp"
#include "formats/hf_directory.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::formats;
using test::error_of;
using test::holds;
namespace fs = std::filesystem;

namespace {

struct StoredBytes : checkpoint::TensorInfo {
  std::vector<uint8_t> bytes;
};
class Memory final : public checkpoint::MapSource<StoredBytes> {
 public:
  std::string description() const override { return "memory"; }
  void add(const std::string& name, const Shape& shape, std::vector<uint8_t> bytes, DType type = DType::u8) {
    tensors_[name] = {{type, shape}, std::move(bytes)};
  }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override {
    const StoredBytes& tensor = entry(name);
    copy_region(wanted, full_region(tensor.shape), reinterpret_cast<const std::byte*>(tensor.bytes.data()),
                tensor.dtype, wanted, out.data(), dtype);
  }
};

std::vector<uint8_t> random_bytes(int64_t count, uint64_t seed, uint8_t first, uint64_t below) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    bytes.push_back(static_cast<uint8_t>(first + (seed >> 33) % below));
  }
  return bytes;
}

// The value of element [expert, in, out] from the bits of the formats' definitions.
float value_of(const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales, int64_t row, int64_t in,
               int64_t blocks) {
  const uint8_t byte = codes[static_cast<size_t>((row * blocks + in / 32) * 16 + in % 32 / 2)],
                code = in % 2 == 0 ? byte % 16 : byte / 16;
  const int sign = code / 8, exponent = code / 2 % 4, fraction = code % 2;
  const double magnitude = exponent == 0 ? fraction / 2.0 : std::pow(2, exponent - 1) * (1 + fraction / 2.0);
  const int scale = scales[static_cast<size_t>(row * blocks + in / 32)];
  return static_cast<float>((sign != 0 ? -1 : 1) * magnitude * std::pow(2.0, scale - 127));
}

}  // namespace

TEST_CASE("codes times the powers of two of their blocks; any region of them") {
  for (const uint64_t seed : {1, 2, 3}) {
    const int64_t experts = 3, out = 5, blocks = 3, in = 32 * blocks;
    const auto codes = random_bytes(experts * out * blocks * 16, seed, 0, 256),
               scales = random_bytes(experts * out * blocks, seed + 9, 100, 50);
    Memory memory;
    memory.add("mlp.down_proj_blocks", {experts, out, blocks, 16}, codes);
    memory.add("mlp.down_proj_scales", {experts, out, blocks}, scales);
    memory.add("other_scales", {4}, {1, 2, 3, 4});
    Mxfp4Weights weights(memory);
    CHECK(weights.names() == std::vector<std::string>{"mlp.down_proj", "other_scales"});
    CHECK(weights.at("mlp.down_proj").dtype == DType::bf16);
    CHECK(weights.at("mlp.down_proj").shape == Shape{experts, in, out});
    for (const Region& region :
         {Region{{0, 0, 0}, {experts, in, out}}, Region{{1, 31, 2}, {2, 3, 1}}, Region{{2, 95, 4}, {1, 1, 1}},
          Region{{0, 32, 0}, {1, 32, 5}}, Region{{0, 5, 1}, {3, 60, 3}}}) {
      CAPTURE(region.text());
      std::vector<float> got(static_cast<size_t>(region.sizes.elements())), wanted;
      weights.read("mlp.down_proj", DType::f32, region, std::as_writable_bytes(std::span(got)));
      for (int64_t e = 0; e < region.sizes[0]; ++e)
        for (int64_t i = 0; i < region.sizes[1]; ++i)
          for (int64_t o = 0; o < region.sizes[2]; ++o)
            wanted.push_back(value_of(codes, scales, (region.offsets[0] + e) * out + region.offsets[2] + o,
                                      region.offsets[1] + i, blocks));
      CHECK(got == wanted);
    }
    std::vector<uint8_t> others(4);
    weights.read("other_scales", DType::u8, full_region({4}), std::as_writable_bytes(std::span(others)));
    CHECK(others == std::vector<uint8_t>{1, 2, 3, 4});
  }
}

TEST_CASE("blocks and scales that do not fit each other are refused") {
  const auto refused = [](const Shape& blocks, const Shape& scales, DType type = DType::u8) {
    Memory memory;
    memory.add("w_blocks", blocks, std::vector<uint8_t>(static_cast<size_t>(blocks.elements())), type);
    memory.add("w_scales", scales, std::vector<uint8_t>(static_cast<size_t>(scales.elements())));
    return error_of([&] { Mxfp4Weights weights(memory); });
  };
  CHECK(refused({2, 4, 3, 16}, {2, 4, 3}).empty());
  CHECK(holds(refused({2, 4, 3, 16}, {2, 4, 2}), "\"w_scales\" is [2,4,2]"));
  CHECK(holds(refused({2, 4, 3, 15}, {2, 4, 3}), "\"w_blocks\" is [2,4,3,15]"));
  CHECK(holds(refused({2, 4, 16}, {2, 4}), "\"w_blocks\" is [2,4,16]"));
  CHECK(holds(refused({2, 4, 3, 16}, {2, 4, 3}, DType::i8), "\"w_blocks\""));
  // One without the other is another tensor, that the model does not have.
  Memory memory;
  memory.add("w_blocks", {2, 4, 3, 16}, std::vector<uint8_t>(384));
  CHECK(Mxfp4Weights(memory).names() == std::vector<std::string>{"w_blocks"});
}

TEST_CASE("a model in MXFP4 is imported, and exported in bf16") {
  const test::TemporaryDirectory home;
  const fs::path from = test::kFormatFixtures / "quantized/gpt_oss_mxfp4";
  HfDirectory packed(from);
  const auto external = ExternalModel::open("hf:" + from.string());
  write_checkpoint(*external, home.path() / "checkpoint", DType::bf16);
  auto reader = checkpoint::Reader::open(home.path() / "checkpoint", checkpoint::Verification::content);
  write_hf(test::exported_of(reader, external->model()), home.path() / "back");
  HfDirectory back(home.path() / "back");
  CHECK_FALSE(json_of(back.read_text("config.json")).contains("quantization_config"));
  const auto bytes = [&](const std::string& name) {
    const auto span = packed.bytes(name);
    const auto* data = reinterpret_cast<const uint8_t*>(span.data());
    return std::vector<uint8_t>(data, data + span.size());
  };
  int tensors = 0;
  for (const std::string layer : {"0", "1"})
    for (const auto& [name, in, out] :
         {std::tuple<const char*, int64_t, int64_t>{"gate_up_proj", 32, 128}, {"down_proj", 64, 32}}) {
      const std::string tensor = "model.layers." + layer + ".mlp.experts." + name;
      CAPTURE(tensor);
      const auto codes = bytes(tensor + "_blocks"), scales = bytes(tensor + "_scales");
      REQUIRE(back.find(tensor));
      CHECK(back.at(tensor).dtype == DType::bf16);
      REQUIRE(back.at(tensor).shape == Shape{3, in, out});
      const auto values = test::floats(back, tensor);
      size_t i = 0;
      for (int64_t expert = 0; expert < 3; ++expert)
        for (int64_t r = 0; r < in; ++r)
          for (int64_t c = 0; c < out; ++c, ++i)
            REQUIRE(values[i] == value_of(codes, scales, expert * out + c, r, in / 32));
      ++tensors;
    }
  CHECK(tensors == 4);
  // The other tensors, and four in place of eight.
  CHECK(back.names().size() + 4 == packed.names().size());
}

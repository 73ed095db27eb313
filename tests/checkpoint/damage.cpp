// Tests damaged and malicious checkpoints: every truncation, every flipped bit of the manifest, and invalid
// manifests with valid hashes.
#include <doctest/doctest.h>

#include "checkpoint/manifest.hpp"
#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

static Manifest example() {
  Manifest manifest;
  manifest.info.step = 3;
  manifest.info.run_id = "run \"x\"\n";
  manifest.files["rank-00000.safetensors"] = {10, std::string(32, 'a'), {std::string(16, 'b')}};
  manifest.tensors["w"] = {{DType::bf16, {2, 3}},
                           {{"rank-00000.safetensors", "w[0:1,0:3]", {{0, 0}, {1, 3}}},
                            {"rank-00000.safetensors", "w[1:2,0:3]", {{1, 0}, {1, 3}}}}};
  return manifest;
}

TEST_CASE("a manifest reads back as written") {
  const std::string text = manifest_text(example());
  const Manifest manifest = parse_manifest(text, "m");
  CHECK(manifest.info.run_id == "run \"x\"\n");
  CHECK(manifest.tensors.at("w").chunks[1].where == Region{{1, 0}, {1, 3}});
  CHECK(manifest_text(manifest) == text);
}

TEST_CASE("every truncation and every flipped bit of a manifest is noticed") {
  const std::string text = manifest_text(example());
  for (size_t size = 0; size < text.size(); ++size)
    REQUIRE(!error_of([&] { parse_manifest(text.substr(0, size), "m"); }).empty());
  for (size_t at = 0; at < text.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      REQUIRE(!error_of([&] { parse_manifest(changed, "m"); }).empty());
    }
  REQUIRE(!error_of([&] { parse_manifest(text + "\n", "m"); }).empty());
}

TEST_CASE(
    "every flipped byte and truncation of every file of a small checkpoint is noticed, and reading never "
    "crashes") {
  const TemporaryDirectory root;
  const fs::path path = save_small(real_file_system(), root.path(), 1);
  size_t flips = 0;
  for (const std::string name : {"manifest.json", "rank-00000.safetensors", "state.json"}) {
    const std::string content = slurp(path / name);
    for (size_t at = 0; at < content.size(); ++at, ++flips) {
      std::string changed = content;
      changed[at] = static_cast<char>(changed[at] ^ (1 << (at % 8)));
      spill(path / name, changed);
      const auto problems = verify(path, Verification::content);
      REQUIRE(!problems.empty());
      REQUIRE(problems[0].file == name);
      // Without the content check, reading a damaged shard gives wrong numbers or an error with its name, and
      // never crashes.
      error_of([&] {
        Reader reader = Reader::open(path, Verification::structure);
        std::vector<float> w(15);
        reader.read_all("w", DType::f32, writable_bytes_of(w));
        reader.read_text(kStateFile);
      });
    }
    for (size_t size = 0; size < content.size(); size += 1 + size / 64) {
      spill(path / name, content.substr(0, size));
      REQUIRE(!verify(path, Verification::structure).empty());
    }
    spill(path / name, content);
  }
  CHECK(flips > 1000);
  CHECK(verify(path, Verification::content).empty());
}

TEST_CASE("invalid manifests with valid hashes are refused with the location") {
  const std::string text = manifest_text(example());
  const std::string body = text.substr(0, text.rfind(",\n\"manifest_hash\""));
  const auto refusal = [&](const std::string& changed) {
    return error_of([&] { parse_manifest(append_manifest_hash(changed), "m"); });
  };
  REQUIRE(refusal(body).empty());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = body;
    const size_t at = changed.find(from);
    REQUIRE(at != std::string::npos);
    return refusal(changed.replace(at, from.size(), to));
  };
  CHECK(holds(refusal("{"), "bad JSON"));
  CHECK(holds(refusal("{\"schema\": \"x\""), "`.schema` is \"x\"; a checkpoint's is"));
  CHECK(holds(with("capstan.checkpoint/1", "capstan.checkpoint/2"),
              "written in the format \"capstan.checkpoint/2\""));
  CHECK(holds(with("\"step\": 3", "\"step\": -3"), "`.step` is not an integer"));
  CHECK(holds(with("\"step\": 3", "\"step\": 3.5"), "`.step` is not an integer"));
  CHECK(holds(with("\"step\": 3", "\"step\": 3,\"step\": 4"), "duplicate key \"step\""));
  CHECK(holds(with("\"step\": 3,", ""), "lacks `step`"));
  CHECK(holds(with("\"step\": 3", "\"step\": 3, \"more\": 1"), "unknown key \"more\""));
  CHECK(holds(with("\"world\": 1", "\"world\": \"1\""), "`.world`"));
  CHECK(holds(with("\"block_bytes\": 4194304", "\"block_bytes\": 0"), "`.block_bytes` is below 4096"));
  CHECK(holds(with("\"rank-00000.safetensors\": {", "\"../rank-00000.safetensors\": {"),
              "is not a name that a checkpoint's file"));
  CHECK(holds(with("\"rank-00000.safetensors\": {", "\"/etc/passwd\": {"), "is not a name"));
  CHECK(holds(with("\"rank-00000.safetensors\": {", "\".hidden\": {"), "is not a name"));
  CHECK(holds(with("\"rank-00000.safetensors\": {", "\"manifest.json\": {"), "is not a name"));
  CHECK(holds(with("\"rank-00000.safetensors\": {", "\"other\": {"),
              "names a file that the manifest does not list"));
  CHECK(holds(with("\"bytes\": 10", "\"bytes\": 9223372036854775807"), "has 1 entries"));
  CHECK(holds(with("\"bytes\": 10", "\"bytes\": 18446744073709551616"), "not an integer"));
  CHECK(holds(with("aaaa", "AAAA"), "lower-case hexadecimal"));
  CHECK(holds(with("bbbb", "bbb"), "16 lower-case hexadecimal"));
  CHECK(holds(with("\"bf16\"", "\"F32\""), "is not an element type"));
  CHECK(holds(with("\"shape\": [2,3]", "\"shape\": [2,4]"), "element [0,3] is in no region"));
  CHECK(holds(with("\"shape\": [2,3]", "\"shape\": [4294967296,4294967296]"), "more than 2^63 bytes"));
  CHECK(holds(with("\"shape\": [2,3]", "\"shape\": [1,1,1,1,1,2,3]"), "more than 6 dimensions"));
  CHECK(holds(with("\"offsets\": [1,0]", "\"offsets\": [0,0]"), "element [0,0] is in 2 regions"));
  CHECK(holds(with("\"offsets\": [1,0]", "\"offsets\": [9223372036854775807,0]"),
              "of a tensor of shape [2,3]"));
  CHECK(
      holds(with("\"offsets\": [1,0]", "\"offsets\": [1]"), "covers offsets and sizes of different lengths"));
  CHECK(holds(refusal(body + ", \"deep\": " + std::string(100000, '[') + std::string(100000, ']')),
              "nested deeper than 64"));
}

TEST_CASE("a shard that contradicts the manifest is refused on reading") {
  const TemporaryDirectory root;
  const fs::path path = save_small(real_file_system(), root.path(), 1);
  // The same bytes with another shape, and with all hashes corrected.
  std::string shard = slurp(path / "rank-00000.safetensors");
  const size_t at = shard.find("[3,5]");
  shard.replace(at, 5, "[5,3]");
  spill(path / "rank-00000.safetensors", shard);
  Manifest manifest = parse_manifest(slurp(path / "manifest.json"), "m");
  manifest.files["rank-00000.safetensors"] = hash_file(path / "rank-00000.safetensors");
  spill(path / "manifest.json", manifest_text(manifest));
  Reader reader = Reader::open(path, Verification::content);
  std::vector<float> w(15);
  CHECK(holds(error_of([&] { reader.read_all("w", DType::f32, writable_bytes_of(w)); }),
              "tensor \"w\" is F32 [5,3], but the manifest states fp32 [3,5]"));
}

#include "checkpoint/safetensors.hpp"

#include <doctest/doctest.h>

#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

// A file from a header and the number of its data bytes.
static std::string make_file(const std::string& header, size_t data_bytes) {
  std::string text(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(text.data(), &length, 8);
  return text + header + std::string(data_bytes, 'x');
}
static std::string refusal(const std::string& content) {
  return error_of([&] { parse_safetensors(bytes_of(content), "f"); });
}

TEST_CASE("files of the reference implementation are read") {
  const SafetensorsFile file(golden("types.safetensors"));
  CHECK(file.entries().size() == 12);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  const auto& b = file.at("b.weight");
  CHECK(b.dtype == DType::f32);
  CHECK(b.shape == Shape{3, 5});
  for (int i = 0; i < 15; ++i) {
    float value;
    std::memcpy(&value, file.bytes(b).data() + 4 * i, 4);
    CHECK(value == static_cast<float>(i) / 8);
  }
  CHECK(file.at("scalar").shape.empty());
  CHECK(file.bytes(file.at("scalar")).size() == 4);
  CHECK(file.at("empty").shape == Shape{0, 4});
  CHECK(file.bytes(file.at("empty")).empty());
  CHECK(file.at("ids").dtype == DType::i64);
  CHECK(file.at("name \"quoted\" \\ Größe 日本").dtype == DType::i8);
  CHECK(file.find("nothing") == nullptr);
  CHECK(holds(error_of([&] { file.at("a.wieght"); }), "no tensor \"a.wieght\""));

  const SafetensorsFile external(golden("external.safetensors"));
  CHECK(external.at("mask").dtype_name == "BOOL");
  CHECK(!external.at("mask").dtype);
}

TEST_CASE("written files equal those of the reference implementation byte for byte") {
  const TemporaryDirectory directory;
  for (const std::string name : {"types.safetensors", "plain.safetensors", "half.safetensors"}) {
    const SafetensorsFile reference(golden(name));
    std::vector<SafetensorsTensor> tensors;
    for (const auto& e : reference.entries()) {
      const auto bytes = reference.bytes(e);
      tensors.push_back({e.name, *e.dtype, e.shape, source_of(bytes)});
    }
    std::reverse(tensors.begin(), tensors.end());  // the order in which they are given does not matter
    const auto path = directory.path() / name;
    const FileHash hash = write_safetensors(real_file_system(), path, tensors, reference.metadata());
    CHECK(slurp(path) == slurp(golden(name)));
    CHECK(hash.bytes == static_cast<int64_t>(fs::file_size(path)));
    CHECK(hash.full == hash_of(slurp(path)));
    const FileHash again = hash_file(path);
    CHECK(again.full == hash.full);
    CHECK(again.blocks == hash.blocks);
  }
}

TEST_CASE("hashes are those of xxhsum, of the file and of its blocks, however the bytes arrive") {
  // echo -n abc | xxhsum -H2
  CHECK(hash_of(std::string_view("abc")) == "06b05ab6733a618578af5f94892f3950");
  CHECK(hash_of(std::string_view("")) == "99aa06d3014798d86001c324468d497f");
  std::string data;
  for (int i = 0; i < 100000; ++i) data += static_cast<char>(i * 7 + i / 251);
  Hasher one(4096), many(4096);
  one.update(bytes_of(data));
  for (size_t at = 0; at < data.size();) {
    const size_t count = std::min(data.size() - at, at % 977 + 1);
    many.update(bytes_of(data).subspan(at, count));
    at += count;
  }
  const FileHash a = one.finish(), b = many.finish();
  CHECK(a.full == b.full);
  CHECK(a.full == hash_of(data));
  CHECK(a.blocks == b.blocks);
  CHECK(a.blocks.size() == 25);
  Hasher block(4096);
  block.update(bytes_of(data).subspan(4096, 4096));
  CHECK(block.finish().blocks[0] == a.blocks[1]);
}

TEST_CASE("a source of the wrong size and a repeated name are our own bugs") {
  const TemporaryDirectory directory;
  const std::string four = "1234";
  const SafetensorsTensor w{"w", DType::f32, {1}, source_of(bytes_of(four))};
  const SafetensorsTensor wrong{"v", DType::f32, {2}, source_of(bytes_of(four))};
  const auto write = [&](std::vector<SafetensorsTensor> tensors) {
    return error_of([&] { write_safetensors(real_file_system(), directory.path() / "f", tensors, {}); });
  };
  CHECK(write({w}).empty());
  CHECK(holds(write({w, wrong}), "gave 4 bytes instead of 8"));
  CHECK(holds(write({w, w}), "twice"));
}

TEST_CASE("malformed files are refused with the reason and the location") {
  const std::string ok = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  REQUIRE(refusal(make_file(ok, 8)).empty());
  REQUIRE(refusal(make_file("{}", 0)).empty());
  REQUIRE(refusal(make_file(ok + "   ", 8)).empty());

  struct Row {
    std::string header;
    size_t data;
    std::string expected;
  };
  const auto tensor = [](const std::string& fields) { return "{\"w\":{" + fields + "}}"; };
  const std::vector<Row> rows{
      {"", 0, "offset 8: the header does not begin with `{`"},
      {"[]", 0, "offset 8: the header does not begin"},
      {" {}", 0, "offset 8: the header does not begin"},
      {"{}\n", 0, "offset 10: the header does not end"},
      {"{}{}", 0, "bad JSON"},
      {"{", 0, "does not end with `}`"},
      {"{\"w\":}", 0, "bad JSON"},
      {"{\"w\":null}", 0, "found null"},
      {"{\"w\":[]}", 0, "found an array"},
      {"{\"w\":{}}", 0, "`dtype` is missing"},
      {"{\"a\":{\"a\":{\"a\":{\"a\":{}}}}}", 0, "unknown field"},
      {"{\"\xff\":{}}", 0, "offset 10: the header is not valid UTF-8"},
      {"{\"\\ud800\":{}}", 0, "bad JSON"},
      {"{\"a\\u0000b\":{}}", 0, "control character"},
      {"{\"../x\":{}}", 0, "path component"},
      {"{\"" + std::string(5000, 'n') + "\":{}}", 0, "longer than 4096"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "metadata are strings"},
      {"{\"__metadata__\":{\"a\":{}}}", 0, "metadata are strings"},
      {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "duplicate key \"a\""},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate name"},
      {tensor(R"("dtype":"F32","shape":[2])"), 8, "tensor \"w\": `data_offsets` is missing"},
      {tensor(R"("dtype":"F32","data_offsets":[0,8])"), 8, "`shape` is missing"},
      {tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), 8, "unknown element type \"F33\""},
      {tensor(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"), 8,
       "found the number 7 where a string for `dtype`"},
      {tensor(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8,
       "duplicate field \"dtype\""},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1)"), 8, "unknown field \"more\""},
      {tensor(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), 8, "where an array for `shape`"},
      {tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8, "found the number 2.0"},
      {tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8, "negative number -2"},
      {tensor(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"), 8, "found a string"},
      {tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), 8, "found an array"},
      {tensor(R"("dtype":"F32","shape":[1e999],"data_offsets":[0,8])"), 8, "bad JSON"},
      {tensor(R"("dtype":"F32","shape":[NaN],"data_offsets":[0,8])"), 8, "bad JSON"},
      {tensor(R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8])"), 8,
       "found the number 18446744073709551616"},
      {tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])"), 8,
       "found the number 18446744073709551615"},
      {tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"), 8,
       "more than 2^63 elements"},
      {tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8])"), 8,
       "overflows the size in bits"},
      {tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,8])"), 8, "not a multiple of 8 bits"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8, "fewer than two"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), 8, "more than two"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, "end before they begin"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4,
       "takes 8 bytes, but data_offsets [0,4] hold 4"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), 12, "leaves a hole after 0"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 7, "the file holds 7 from offset"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 9, "the file holds 9"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "tensor \"b\": its data begins at 2, inside of the tensor before it"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
       9, "hole"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
       8, "duplicate name \"a\""},
  };
  for (const auto& row : rows) {
    CAPTURE(row.header.substr(0, 120));
    const std::string text = refusal(make_file(row.header, row.data));
    CAPTURE(text);
    CHECK(holds(text, row.expected));
    CHECK(text.starts_with("format: f: "));
  }
  std::string dims = "1";
  for (int i = 0; i < 64; ++i) dims += ",1";
  CHECK(
      holds(refusal(make_file(tensor("\"dtype\":\"U8\",\"shape\":[" + dims + "],\"data_offsets\":[0,1]"), 1)),
            "more than 6 dimensions"));
}

TEST_CASE("the header's length is checked against the file and the limit") {
  std::string file = make_file("{}", 0);
  for (const uint64_t length : {uint64_t{3}, uint64_t{99'999'999}, uint64_t{100'000'001}, UINT64_MAX,
                                UINT64_MAX - 8, uint64_t{1} << 63}) {
    std::memcpy(file.data(), &length, 8);
    CHECK(!refusal(file).empty());
  }
  for (size_t size = 0; size < 8; ++size)
    CHECK(holds(refusal(std::string(size, '\0')), "the header length needs 8 bytes"));
  CHECK(holds(refusal(make_file("{\"a\":" + std::string(1'000'000, '[') + "}", 0)), "found an array"));
}

TEST_CASE("every truncation and every flipped header bit of a small file is handled") {
  const std::string file = slurp(golden("types.safetensors"));
  for (size_t size = 0; size < file.size(); ++size) REQUIRE(!refusal(file.substr(0, size)).empty());
  REQUIRE(!refusal(file + "x").empty());
  // A flipped bit may make another valid header (a letter of a name); it must never crash or reach outside of
  // the file.
  for (size_t at = 0; at < 860; ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = file;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      error_of([&] {
        for (const auto& e : parse_safetensors(bytes_of(changed), "f").entries)
          REQUIRE(e.end <= static_cast<int64_t>(changed.size()));
      });
    }
}

TEST_CASE("a missing file, a directory and a pipe are named errors") {
  const TemporaryDirectory directory;
  CHECK(holds(error_of([&] { SafetensorsFile(directory.path() / "none"); }), "not found: "));
  CHECK(holds(error_of([&] { SafetensorsFile(directory.path()); }), "is a directory"));
}

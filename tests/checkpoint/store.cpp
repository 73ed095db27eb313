#include "checkpoint/store.hpp"
#include "checkpoint/tensor_source.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>

#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

static std::vector<float> read_all(Reader& reader, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(reader.at(name).shape.elements()));
  reader.read_all(name, DType::f32, writable_bytes_of(values));
  return values;
}
static std::vector<int64_t> steps(const fs::path& root) {
  std::vector<int64_t> result;
  for (const auto& checkpoint : list_checkpoints(root)) result.push_back(checkpoint.step);
  return result;
}
static void flip(const fs::path& file, size_t at) {
  std::string content = slurp(file);
  REQUIRE(at < content.size());
  content[at] = static_cast<char>(content[at] ^ 1);
  spill(file, content);
}

TEST_CASE("a checkpoint comes back as it was saved") {
  const TemporaryDirectory root;
  const fs::path path = save_small(real_file_system(), root.path(), 100);
  CHECK(path == root.path() / "step-00000100");
  CHECK(verify(path, Verification::content).empty());
  Reader reader = Reader::open(path, Verification::content);
  CHECK(reader.info().step == 100);
  CHECK(reader.info().consumed_samples == 800);
  CHECK(reader.info().run_id == "run");
  CHECK(read_all(reader, "w") == ramp({3, 5}));
  CHECK(read_all(reader, "b") == ramp({5}, 0.5f));
  CHECK(reader.read_text(kStateFile) == "{\"step\": 100}\n");
  CHECK(reader.has_file(kStateFile));
  CHECK(!reader.has_file(kRecipeFile));
  CHECK(holds(error_of([&] { reader.at("weight"); }), "has no tensor \"weight\""));
  // A full tensor keeps its name in the shard, which any safetensors reader opens.
  CHECK(SafetensorsFile(path / "rank-00000.safetensors").at("w").shape == Shape{3, 5});
  // The same save gives the same bytes.
  const TemporaryDirectory other;
  const fs::path twin = save_small(real_file_system(), other.path(), 100, 0, "b");
  for (const auto& entry : fs::directory_iterator(path))
    CHECK(slurp(entry.path()) == slurp(twin / entry.path().filename()));
}

TEST_CASE("any layout reads what any layout wrote, element by element") {
  // Tensors of rank 0 to 4, written by flat ranges, rows, columns or in full; read by other regions.
  const std::vector<std::pair<std::string, Shape>> tensors{{"scalar", {}},         {"vector", {13}},
                                                           {"matrix", {7, 9}},     {"cube", {3, 4, 5}},
                                                           {"four", {2, 3, 2, 5}}, {"empty", {0, 3}}};
  const auto regions_of = [](const Shape& shape, int kind, int rank, int world) {
    std::vector<Region> chunks;
    if (kind == 0 || shape.empty()) {  // one owner
      if (rank == world - 1) chunks.push_back(full_region(shape));
    } else if (kind == 1) {  // flat range, as sharded optimizer state has it
      const int64_t total = shape.elements(), begin = total * rank / world, end = total * (rank + 1) / world;
      chunks = flat_range_as_regions(shape, begin, end - begin);
    } else {  // rows or columns
      const size_t d = kind == 2 ? 0 : shape.size() - 1;
      Region r = full_region(shape);
      r.offsets[d] = shape[d] * rank / world;
      r.sizes[d] = shape[d] * (rank + 1) / world - r.offsets[d];
      if (r.sizes[d] > 0) chunks.push_back(r);
    }
    return chunks;
  };
  for (int kind = 0; kind < 4; ++kind)
    for (const int world : {1, 2, 3, 5}) {
      const TemporaryDirectory root;
      SaveInfo info;
      info.step = 7;
      std::vector<std::vector<float>> alive;
      std::vector<std::unique_ptr<Writer>> writers;
      std::vector<std::string> parts;
      for (int rank = 0; rank < world; ++rank) {
        auto& writer = *writers.emplace_back(
            std::make_unique<Writer>(real_file_system(), root.path(), info, "x", rank, world));
        for (const auto& [name, shape] : tensors)
          for (const auto& chunk : regions_of(shape, kind, rank, world)) {
            alive.push_back(values_of(ramp(shape), shape, chunk));
            writer.add(name, DType::f32, shape, chunk, bytes_of(alive.back()));
          }
        if (rank == 0) writer.add_text(kStateFile, "{}");
        parts.push_back(writer.finish_rank());
      }
      std::reverse(parts.begin(), parts.end());
      Reader reader = Reader::open(writers[0]->commit(parts), Verification::content);
      CHECK(reader.manifest().world == world);
      for (const auto& [name, shape] : tensors) {
        if (shape.elements() == 0 && kind != 0) continue;
        for (int read_kind = 0; read_kind < 4; ++read_kind)
          for (int rank = 0; rank < 3; ++rank)
            for (const auto& wanted : regions_of(shape, read_kind, rank, 3)) {
              std::vector<float> got(static_cast<size_t>(wanted.sizes.elements()), -1);
              reader.read(name, DType::f32, wanted, writable_bytes_of(got));
              REQUIRE(got == values_of(ramp(shape), shape, wanted));
            }
      }
    }
}

TEST_CASE("a rank opens only the shards it needs") {
  const TemporaryDirectory root;
  SaveInfo info;
  Writer first(real_file_system(), root.path(), info, "x", 0, 2),
      second(real_file_system(), root.path(), info, "x", 1, 2);
  const auto values = ramp({4});
  first.add("a", DType::f32, {8}, {{0}, {4}}, bytes_of(values));
  second.add("a", DType::f32, {8}, {{4}, {4}}, bytes_of(values));
  const std::vector<std::string> parts{first.finish_rank(), second.finish_rank()};
  const fs::path path = first.commit(parts);
  Reader reader = Reader::open(path, Verification::structure);
  spill(path / "rank-00001.safetensors", "gone bad");
  std::vector<float> got(4);
  reader.read("a", DType::f32, {{0}, {4}}, writable_bytes_of(got));
  CHECK(got == values);
  CHECK(!error_of([&] { reader.read("a", DType::f32, {{1}, {4}}, writable_bytes_of(got)); }).empty());
}

TEST_CASE("element types convert on reading where that is sound") {
  const TemporaryDirectory root;
  Writer writer(real_file_system(), root.path(), {}, "x", 0, 1);
  const std::vector<float> values{1.0f, -2.5f, 3.14159f};
  const std::vector<int64_t> ids{1, 2};
  writer.add("w", DType::f32, {3}, full_region({3}), bytes_of(values));
  writer.add("ids", DType::i64, {2}, full_region({2}), bytes_of(ids));
  Reader reader = Reader::open(writer.commit({writer.finish_rank()}), Verification::content);
  std::vector<bf16> narrow(3);
  reader.read_all("w", DType::bf16, writable_bytes_of(narrow));
  for (size_t i = 0; i < 3; ++i) CHECK(narrow[i].bits == bf16(values[i]).bits);
  std::vector<float> wrong(2);
  CHECK(holds(error_of([&] { reader.read_all("ids", DType::f32, writable_bytes_of(wrong)); }),
              "is stored as i64 and cannot be read as fp32"));
  CHECK(holds(error_of([&] {
                reader.read("w", DType::f32, {{2}, {2}}, writable_bytes_of(wrong));
              }),
              "has shape [3]"));
}

TEST_CASE("bytes may be produced when they are written") {
  const TemporaryDirectory root;
  Writer writer(real_file_system(), root.path(), {}, "x", 0, 1);
  std::vector<float> staging(4);
  for (int k = 0; k < 3; ++k)
    writer.add("t" + std::to_string(k), DType::f32, {4}, full_region({4}),
               [&staging, k](const ByteSink& sink) {
                 staging = ramp({4}, static_cast<float>(k) * 10);
                 sink(bytes_of(staging).first(5));
                 sink(bytes_of(staging).subspan(5));
                 staging.assign(4, -1);  // the writer no longer reads it
               });
  Reader reader = Reader::open(writer.commit({writer.finish_rank()}), Verification::content);
  for (int k = 0; k < 3; ++k)
    CHECK(read_all(reader, "t" + std::to_string(k)) == ramp({4}, static_cast<float>(k) * 10));
}

TEST_CASE("row_slabs divides a region into slabs of rows of at most so many bytes") {
  const Region where{{10, 3}, {7, 5}};
  CHECK(row_slabs(where, DType::f32, 1 << 20) == std::vector{where});
  const auto slabs = row_slabs(where, DType::f32, 2 * 5 * 4 + 1);
  REQUIRE(slabs.size() == 4);
  CHECK(slabs[0] == Region{{10, 3}, {2, 5}});
  CHECK(slabs[3] == Region{{16, 3}, {1, 5}});
  CHECK(row_slabs(where, DType::f32, 1).size() == 7);
  CHECK(row_slabs(Region{{}, {}}, DType::f32, 1).size() == 1);
  CHECK(row_slabs(Region{{0, 0}, {0, 5}}, DType::f32, 1).empty());
  CHECK(row_slabs(Region{{0, 0}, {5, 0}}, DType::f32, 1).size() == 1);
}

TEST_CASE("tensors larger than a chunk are read and written in chunks") {
  const TemporaryDirectory root;
  const Shape shape{5000, 1000};  // 20 MB
  const auto values = ramp(shape);
  Writer writer(real_file_system(), root.path() / "a", {}, "x", 0, 1);
  writer.add("w", DType::f32, shape, full_region(shape), bytes_of(values));
  Reader reader = Reader::open(writer.commit({writer.finish_rank()}), Verification::content);
  CHECK((read_all(reader, "w") == values));
  std::vector<float> part(4900 * 900);
  reader.read("w", DType::f32, {{60, 70}, {4900, 900}}, writable_bytes_of(part));
  bool same = true;
  for (size_t row = 0; row < 4900; ++row)
    same &= std::equal(part.begin() + static_cast<int64_t>(row) * 900,
                       part.begin() + static_cast<int64_t>(row + 1) * 900,
                       values.begin() + static_cast<int64_t>(row + 60) * 1000 + 70);
  CHECK(same);
  Writer again(real_file_system(), root.path() / "b", {}, "x", 0, 1);
  size_t chunks = 0;
  again.add("w", DType::f32, shape, full_region(shape), [&](const ByteSink& sink) {
    source_of(reader, "w", DType::f32)([&](std::span<const std::byte> bytes) {
      ++chunks;
      CHECK(static_cast<int64_t>(bytes.size()) <= kChunkBytes);
      sink(bytes);
    });
  });
  Reader copied = Reader::open(again.commit({again.finish_rank()}), Verification::content);
  CHECK(chunks == 3);
  CHECK((read_all(copied, "w") == values));
}

TEST_CASE("a commit refuses rank manifests that do not cover the tensors") {
  const TemporaryDirectory root;
  const auto values = ramp({4});
  const auto attempt = [&](const Region& a, const Region& b, auto change) {
    SaveInfo info;
    Writer first(real_file_system(), root.path(), info, "x", 0, 2),
        second(real_file_system(), root.path(), info, "x", 1, 2);
    first.add("w", DType::f32, {8}, a, bytes_of(values));
    second.add("w", DType::f32, {8}, b, bytes_of(values));
    std::vector<std::string> parts{first.finish_rank(), second.finish_rank()};
    change(parts, first);
    const std::string text = error_of([&] { first.commit(parts); });
    first.abandon();
    CHECK(list_checkpoints(root.path()).empty());
    CHECK(fs::is_empty(root.path()));
    return text;
  };
  const auto as_is = [](auto&, auto&) {};
  CHECK(holds(attempt({{0}, {4}}, {{3}, {4}}, as_is),
              "tensor \"w\" of shape [8]: element [3] is in 2 regions"));
  CHECK(holds(attempt({{0}, {4}}, {{0}, {4}}, as_is), "element [0] is in 2 regions"));
  const Region low{{0}, {4}}, high{{4}, {4}};
  CHECK(holds(attempt(low, high, [](auto& parts, auto&) { parts.pop_back(); }), "rank 1 sent no manifest"));
  CHECK(holds(attempt(low, high, [](auto& parts, auto&) { parts[1] = parts[0]; }),
              "does not belong to this save"));
  CHECK(holds(attempt(low, high, [](auto& parts, auto&) { parts[1] = "{"; }), "bad JSON"));
  CHECK(
      holds(attempt(low, high,
                    [](auto&, Writer& w) { fs::remove(w.temporary_directory() / "rank-00001.safetensors"); }),
            "is not there with the"));
}

TEST_CASE("the newest valid checkpoint is found, and newer ones refused with a reason") {
  const TemporaryDirectory root;
  CHECK(!find_latest(root.path() / "none", Verification::content).found);
  for (const int64_t step : {5, 10, 20, 30}) save_small(real_file_system(), root.path(), step);
  fs::create_directory(root.path() / ".tmp-step-00000040-x");
  fs::create_directory(root.path() / "step-40");
  CHECK(find_latest(root.path(), Verification::content).found->step == 30);
  flip(root.path() / "step-00000030/rank-00000.safetensors", 200);
  fs::remove(root.path() / "step-00000020/manifest.json");
  const SearchResult search = find_latest(root.path(), Verification::content);
  REQUIRE(search.found);
  CHECK(search.found->step == 10);
  REQUIRE(search.refused.size() == 2);
  CHECK(search.refused[0].checkpoint.step == 30);
  CHECK(holds(
      search.refused[0].reason,
      "`rank-00000.safetensors` differs from what was written (checksum mismatch) in block 0 (bytes 0 to"));
  CHECK(holds(search.refused[1].reason, "no manifest.json"));
  CHECK(resolve_checkpoint(root.path()).step == 10);
  CHECK(resolve_checkpoint(root.path() / "step-00000005").step == 5);
  CHECK(holds(error_of([&] { resolve_checkpoint(root.path() / "step-00000030"); }), "does not verify"));
  CHECK(holds(error_of([&] { resolve_checkpoint(root.path() / "nothing"); }),
              "not found: run or checkpoint = "));
  const SearchResult other = find_latest(root.path(), Verification::structure, "another");
  CHECK(!other.found);
  CHECK(holds(other.refused.back().reason, "it belongs to run \"run\", not to \"another\""));
}

TEST_CASE("a run directory stands for its newest checkpoint") {
  const TemporaryDirectory run;
  save_small(real_file_system(), run.path() / "checkpoints", 3);
  save_small(real_file_system(), run.path() / "checkpoints", 4);
  CHECK(resolve_checkpoint(run.path()).step == 4);
  fs::remove_all(run.path() / "checkpoints/step-00000003");
  flip(run.path() / "checkpoints/step-00000004/state.json", 2);
  const std::string text = error_of([&] { resolve_checkpoint(run.path()); });
  CHECK(holds(text, "no checkpoint of"));
  CHECK(holds(text, "step-00000004: `state.json` differs"));
}

TEST_CASE("verification reports stale steps and extra, missing, linked and irregular files") {
  const TemporaryDirectory root;
  const fs::path path = save_small(real_file_system(), root.path(), 1);
  const auto first_problem = [&](const fs::path& directory) {
    const auto problems = verify(directory, Verification::structure);
    return problems.empty() ? std::string() : problems[0].text;
  };
  CHECK(first_problem(path).empty());
  CHECK(first_problem(path / "").empty());
  fs::rename(path, root.path() / "step-00000002");
  CHECK(
      holds(first_problem(root.path() / "step-00000002"), "the directory says step 2, its manifest step 1"));
  CHECK(holds(first_problem(root.path() / "step-00000002/"), "the directory says step 2"));
  fs::rename(root.path() / "step-00000002", root.path() / "best");  // a name of the user's own is fine
  CHECK(first_problem(root.path() / "best").empty());
  fs::rename(root.path() / "best", path);
  spill(path / "extra.txt", "x");
  CHECK(holds(first_problem(path), "`extra.txt` is not in the manifest"));
  fs::remove(path / "extra.txt");
  const std::string shard = slurp(path / "rank-00000.safetensors");
  spill(root.path() / "elsewhere", shard);
  fs::remove(path / "rank-00000.safetensors");
  CHECK(holds(first_problem(path), "`rank-00000.safetensors` is missing"));
  fs::create_symlink(root.path() / "elsewhere", path / "rank-00000.safetensors");
  CHECK(holds(first_problem(path), "is not a regular file"));
  fs::remove(path / "rank-00000.safetensors");
  REQUIRE(::mkfifo((path / "rank-00000.safetensors").c_str(), 0600) == 0);
  CHECK(holds(first_problem(path), "is not a regular file"));
  fs::remove(path / "rank-00000.safetensors");
  spill(path / "rank-00000.safetensors", shard);
  CHECK(first_problem(path).empty());
  fs::remove(path / "manifest.json");
  fs::create_symlink(root.path() / "elsewhere", path / "manifest.json");
  CHECK(holds(first_problem(path), "is not a regular file"));
}

TEST_CASE("the block that differs is named") {
  const TemporaryDirectory root;
  Writer writer(real_file_system(), root.path(), {}, "x", 0, 1);
  std::vector<float> large(5 << 20);  // 20 MiB: five blocks and a bit
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<float>(i % 1000);
  writer.add("w", DType::f32, {5 << 20}, full_region({5 << 20}), bytes_of(large));
  const fs::path path = writer.commit({writer.finish_rank()});
  CHECK(verify(path, Verification::content).empty());
  const fs::path shard = path / "rank-00000.safetensors";
  flip(shard, (3 << 22) + 5);
  const auto problems = verify(path, Verification::content);
  REQUIRE(problems.size() == 1);
  CHECK(problems[0].file == "rank-00000.safetensors");
  CHECK(problems[0].block == 3);
  CHECK(holds(problems[0].text, "block 3 (bytes 12582912 to 16777216)"));
  CHECK(verify(path, Verification::structure).empty());
  // Two readers divide the files: exactly one of them finds the damage.
  CHECK(verify(path, Verification::content, 0, 2).size() + verify(path, Verification::content, 1, 2).size() ==
        1);
}

TEST_CASE(
    "retention keeps the newest, the multiples, the evidence, and never deletes the newest that verifies") {
  const TemporaryDirectory root;
  for (int64_t step = 10; step <= 60; step += 10) save_small(real_file_system(), root.path(), step);
  CHECK(apply_retention(real_file_system(), root.path(), {-1, {}, {}}).empty());
  CHECK(apply_retention(real_file_system(), root.path(), {4, 20, 60}) == std::vector<int64_t>{10});
  CHECK(steps(root.path()) == std::vector<int64_t>{60, 50, 40, 30, 20});
  // 60 and 50 are damaged in their data; 40 is the newest that verifies and stays though only two are to be
  // kept.
  flip(root.path() / "step-00000060/rank-00000.safetensors", 200);
  flip(root.path() / "step-00000050/rank-00000.safetensors", 200);
  CHECK(apply_retention(real_file_system(), root.path(), {2, {}, {}}) == std::vector<int64_t>{20, 30});
  CHECK(steps(root.path()) == std::vector<int64_t>{60, 50, 40});
  // A checkpoint with a broken structure is neither counted nor deleted.
  spill(root.path() / "step-00000060/manifest.json", "");
  save_small(real_file_system(), root.path(), 70);
  CHECK(apply_retention(real_file_system(), root.path(), {1, {}, 70}) == std::vector<int64_t>{40, 50});
  CHECK(steps(root.path()) == std::vector<int64_t>{70, 60});
  CHECK(apply_retention(real_file_system(), root.path(), {0, {}, {}}).empty());
  CHECK(fs::exists(root.path() / "step-00000070/manifest.json"));
  for (const auto& entry : fs::directory_iterator(root.path()))
    CHECK(entry.path().filename().string()[0] != '.');
}

TEST_CASE("a step that is saved again replaces the older one atomically") {
  const TemporaryDirectory root;
  save_small(real_file_system(), root.path(), 8, 0, "a");
  const fs::path path = save_small(real_file_system(), root.path(), 8, 1000, "b");
  Reader reader = Reader::open(path, Verification::content);
  CHECK(read_all(reader, "w") == ramp({3, 5}, 1000));
  CHECK(std::distance(fs::directory_iterator(root.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("leftovers of killed processes are cleared, and nothing else") {
  const TemporaryDirectory root;
  save_small(real_file_system(), root.path(), 8);
  fs::create_directories(root.path() / ".tmp-step-00000009-x/deep");
  spill(root.path() / ".tmp-step-00000009-x/deep/file", "x");
  fs::create_directories(root.path() / ".trash-step-00000001-0");
  spill(root.path() / "notes.txt", "mine");
  remove_leftovers(real_file_system(), root.path());
  CHECK(steps(root.path()) == std::vector<int64_t>{8});
  CHECK(fs::exists(root.path() / "notes.txt"));
  CHECK(std::distance(fs::directory_iterator(root.path()), fs::directory_iterator()) == 2);
}

TEST_CASE("a sample for scripts/peers/check_checkpoint.py") {
  const char* out = std::getenv("CAPSTAN_PEER_OUT");
  if (!out) return;
  const fs::path root(out);
  fs::remove_all(root / "step-00000009");
  SaveInfo info;
  info.step = 9;
  constexpr int kWorld = 4;
  std::vector<std::string> parts;
  std::vector<std::vector<float>> alive;
  std::vector<std::vector<bf16>> alive_narrow;
  std::unique_ptr<Writer> last;
  for (int rank = 0; rank < kWorld; ++rank) {
    last = std::make_unique<Writer>(real_file_system(), root, info, "peer", rank, kWorld);
    const Shape flat{5, 7, 3}, rows{8, 6}, columns{3, 16};
    const int64_t begin = 105 * rank / kWorld, end = 105 * (rank + 1) / kWorld;
    for (const auto& chunk : flat_range_as_regions(flat, begin, end - begin)) {
      alive.push_back(values_of(ramp(flat), flat, chunk));
      last->add("flat", DType::f32, flat, chunk, bytes_of(alive.back()));
    }
    const Region row{{rank * 2, 0}, {2, 6}}, column{{0, rank * 4}, {3, 4}};
    alive.push_back(values_of(ramp(rows), rows, row));
    last->add("rows", DType::f32, rows, row, bytes_of(alive.back()));
    const auto values = values_of(ramp(columns), columns, column);
    alive_narrow.emplace_back(values.begin(), values.end());
    last->add("columns", DType::bf16, columns, column, bytes_of(alive_narrow.back()));
    if (rank == 2) {
      alive.push_back({0});
      last->add("scalar", DType::f32, {}, full_region({}), bytes_of(alive.back()));
    }
    parts.push_back(last->finish_rank());
  }
  last->commit(parts);
}

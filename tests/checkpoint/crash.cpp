// Tests saves on a disk that fails, fills up or loses power at the n-th operation, for every n.
#include <doctest/doctest.h>

#include "../support/faulty_disk.hpp"
#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

namespace {

// The first element of `w` of the newest valid checkpoint, which tells saves apart; -1 where there is
// none.
float newest(const fs::path& root) {
  const SearchResult search = find_latest(root, Verification::content);
  if (!search.found) return -1;
  Reader reader = Reader::open(search.found->path, Verification::content);
  std::vector<float> w(15);
  reader.read_all("w", DType::f32, writable_bytes_of(w));
  REQUIRE(w == ramp({3, 5}, w[0]));
  return w[0];
}

void save_and_retain(FileSystem& files, const fs::path& root, int64_t step, float first,
                     const std::string& attempt) {
  save_small(files, root, step, first, attempt);
  apply_retention(files, root, {1, {}, step});
}

}  // namespace

TEST_CASE(
    "whatever operation of a save or of retention fails, the newest that verifies is the old or the new "
    "one") {
  using Mode = FailingDisk::Mode;
  int64_t total = 0;
  {
    const TemporaryDirectory root;
    save_small(real_file_system(), root.path(), 10, 100);
    FailingDisk disk(Mode::count, 0);
    save_and_retain(disk, root.path(), 20, 200, "b");
    total = disk.operations();
    CHECK(newest(root.path()) == 200);
  }
  CHECK(total > 15);
  for (const Mode mode : {Mode::error_once, Mode::dead, Mode::torn_then_dead})
    for (int64_t n = 0; n < total; ++n) {
      const TemporaryDirectory root;
      save_small(real_file_system(), root.path(), 10, 100);
      FailingDisk disk(mode, n);
      const std::string text = error_of([&] { save_and_retain(disk, root.path(), 20, 200, "b"); });
      CAPTURE(n);
      REQUIRE(holds(text, "injected"));
      const float found = newest(root.path());
      REQUIRE((found == 100 || found == 200));
      for (const auto& refused : find_latest(root.path(), Verification::content).refused) {
        CAPTURE(refused.reason);
        REQUIRE(false);  // nothing half done may look like a checkpoint
      }
      // The next process removes leftovers and saves normally.
      remove_leftovers(real_file_system(), root.path());
      save_and_retain(real_file_system(), root.path(), 30, 300, "c");
      REQUIRE(newest(root.path()) == 300);
      REQUIRE(std::distance(fs::directory_iterator(root.path()), fs::directory_iterator()) == 1);
    }
}

TEST_CASE("before the first commit there is nothing, and never something broken") {
  for (int64_t n = 0;; ++n) {
    const TemporaryDirectory root;
    FailingDisk disk(FailingDisk::Mode::dead, n);
    const std::string text = error_of([&] { save_small(disk, root.path(), 20, 200); });
    const float found = newest(root.path());
    REQUIRE((found == -1 || found == 200));
    if (text.empty()) break;
  }
}

TEST_CASE("a step saved again is at every moment the old or the new one") {
  for (int64_t n = 0;; ++n) {
    const TemporaryDirectory root;
    save_small(real_file_system(), root.path(), 20, 100);
    FailingDisk disk(FailingDisk::Mode::dead, n);
    error_of([&] { save_small(disk, root.path(), 20, 200, "b"); });
    const float found = newest(root.path());
    REQUIRE((found == 100 || found == 200));
    if (disk.operations() <= n) break;
  }
}

TEST_CASE("a full disk leaves the old checkpoint, and abandoning the save frees the space") {
  const TemporaryDirectory root;
  save_small(real_file_system(), root.path(), 10, 100);
  FailingDisk disk(FailingDisk::Mode::error_once, 3);
  Writer writer(disk, root.path(), {20, 0, 0, "run", "", "", "", ""}, "b", 0, 1);
  const auto values = ramp({3, 5}, 200);
  writer.add("w", DType::f32, {3, 5}, full_region({3, 5}), bytes_of(values));
  CHECK(holds(error_of([&] { writer.commit({writer.finish_rank()}); }), "no space left"));
  CHECK(fs::exists(writer.temporary_directory()));
  writer.abandon();
  CHECK(!fs::exists(writer.temporary_directory()));
  CHECK(newest(root.path()) == 100);
}

TEST_CASE("a power cut that forgets, tears and reorders what was not synced loses nothing") {
  std::mt19937 random(5);
  const auto run = [&](ForgetfulDisk& disk, const fs::path& root, float& committed) {
    disk.make_directories(root / "c");
    disk.sync_directory(root);
    for (int64_t k = 1; k <= 3; ++k) {
      save_small(disk, root / "c", k * 10, static_cast<float>(k * 100), "a" + std::to_string(k));
      committed = static_cast<float>(k * 100);
      apply_retention(disk, root / "c", {1, {}, k * 10});
    }
    save_small(disk, root / "c", 30, 400, "again");
    committed = 400;
  };
  int64_t total = 0;
  {
    const TemporaryDirectory root;
    ForgetfulDisk disk(root.path());
    float committed = -1;
    run(disk, root.path(), committed);
    total = disk.operations();
  }
  CHECK(total > 60);
  for (int64_t n = 0; n <= total; ++n) {
    const TemporaryDirectory root;
    ForgetfulDisk disk(root.path());
    disk.power_fails_at(n);
    float committed = -1;
    error_of([&] { run(disk, root.path(), committed); });
    for (int chance = 0; chance < 12; ++chance) {
      const TemporaryDirectory after;
      disk.materialize(after.path(), random);
      const float found = newest(after.path() / "c");
      CAPTURE(n);
      CAPTURE(committed);
      // A checkpoint whose save has returned exists; the one being saved may exist.
      REQUIRE((found == committed || found == (committed < 0 ? 100 : committed + 100)));
    }
  }
}

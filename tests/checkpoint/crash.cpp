// Saves on a disk that fails, fills up or loses power at the n-th operation, for every n.
#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>

#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

namespace {

// Counts operations. At the n-th the disk refuses: once (an error), or from then on (the process died).
class FailingDisk final : public FileSystem {
 public:
  enum class Mode { count, error_once, dead, torn_then_dead };
  FailingDisk(Mode mode, int64_t at) : mode_(mode), at_(at) {}
  int64_t operations() const { return done_; }

  std::unique_ptr<File> create(const fs::path& path) override {
    step();
    return std::make_unique<FailingFile>(*this, real_file_system().create(path));
  }
  void make_directories(const fs::path& path) override {
    step();
    real_file_system().make_directories(path);
  }
  void sync_directory(const fs::path& path) override {
    step();
    real_file_system().sync_directory(path);
  }
  void rename_new(const fs::path& from, const fs::path& to) override {
    step();
    real_file_system().rename_new(from, to);
  }
  bool exchange(const fs::path& a, const fs::path& b) override {
    step();
    return real_file_system().exchange(a, b);
  }
  void remove_file(const fs::path& path) override {
    step();
    real_file_system().remove_file(path);
  }
  void remove_directory(const fs::path& path) override {
    step();
    real_file_system().remove_directory(path);
  }

 private:
  class FailingFile final : public File {
   public:
    FailingFile(FailingDisk& disk, std::unique_ptr<File> file) : disk_(disk), file_(std::move(file)) {}
    void write(std::span<const std::byte> bytes) override {
      disk_.step([&] { file_->write(bytes.first(bytes.size() / 2)); });
      file_->write(bytes);
    }
    void finish() override {
      disk_.step();
      file_->finish();
    }

   private:
    FailingDisk& disk_;
    std::unique_ptr<File> file_;
  };

  void step(const std::function<void()>& tear = [] {}) {
    const int64_t now = done_++;
    if (mode_ == Mode::count || now < at_) return;
    if (now == at_ && mode_ == Mode::torn_then_dead) tear();
    if (now == at_ || mode_ != Mode::error_once) fail(ErrorCode::io, "injected: no space left on device");
  }

  Mode mode_;
  int64_t at_, done_ = 0;
};

// What a power cut may leave: file contents and directory entries reach the disk when they are synced, and
// otherwise in part, in any order. The disk model keeps, for each directory, the entries that are durable and
// the changes since.
class ForgetfulDisk final : public FileSystem {
 public:
  struct Node {
    bool directory = false;
    std::string content, durable_content;                                   // files
    std::map<std::string, std::shared_ptr<Node>> entries, durable_entries;  // directories
  };

  explicit ForgetfulDisk(fs::path root) : root_(std::move(root)), top_(std::make_shared<Node>()) {
    top_->directory = true;
  }
  int64_t operations() const { return done_; }
  void power_fails_at(int64_t n) { at_ = n; }

  std::unique_ptr<File> create(const fs::path& path) override {
    step();
    auto node = std::make_shared<Node>();
    find(path.parent_path())->entries[path.filename().string()] = node;
    real_file_system().create(path)->finish();
    return std::make_unique<MemoryFile>(*this, node, real_file_system().create(path));
  }
  void make_directories(const fs::path& path) override {
    step();
    real_file_system().make_directories(path);
    auto node = top_;
    for (const auto& part : fs::relative(path, root_)) {
      if (part == ".") continue;
      auto& next = node->entries[part.string()];
      if (!next) {
        next = std::make_shared<Node>();
        next->directory = true;
      }
      node = next;
    }
  }
  void sync_directory(const fs::path& path) override {
    step();
    const auto node = find(path);
    node->durable_entries = node->entries;
  }
  void rename_new(const fs::path& from, const fs::path& to) override {
    step();
    real_file_system().rename_new(from, to);
    auto& parent = *find(from.parent_path());
    find(to.parent_path())->entries[to.filename().string()] = parent.entries.at(from.filename().string());
    parent.entries.erase(from.filename().string());
  }
  bool exchange(const fs::path& a, const fs::path& b) override {
    step();
    const bool done = real_file_system().exchange(a, b);
    if (done)
      std::swap(find(a.parent_path())->entries.at(a.filename().string()),
                find(b.parent_path())->entries.at(b.filename().string()));
    return done;
  }
  void remove_file(const fs::path& path) override {
    remove(path, [&] { real_file_system().remove_file(path); });
  }
  void remove_directory(const fs::path& path) override {
    remove(path, [&] { real_file_system().remove_directory(path); });
  }

  // One possible state after the power came back: every unsynced directory change and file content is there,
  // gone or (a file) cut anywhere, by chance. A rename within one directory is one change: on the disk or
  // not.
  void materialise(const fs::path& into, std::mt19937& random) const { put(*top_, into, random); }

 private:
  class MemoryFile final : public File {
   public:
    MemoryFile(ForgetfulDisk& disk, std::shared_ptr<Node> node, std::unique_ptr<File> file)
        : disk_(disk), node_(std::move(node)), file_(std::move(file)) {}
    void write(std::span<const std::byte> bytes) override {
      disk_.step();
      node_->content.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      file_->write(bytes);
    }
    void finish() override {
      disk_.step();
      node_->durable_content = node_->content;
      file_->finish();
    }

   private:
    ForgetfulDisk& disk_;
    std::shared_ptr<Node> node_;
    std::unique_ptr<File> file_;
  };

  template <class Action>
  void remove(const fs::path& path, Action action) {
    step();
    action();
    find(path.parent_path())->entries.erase(path.filename().string());
  }
  std::shared_ptr<Node> find(const fs::path& path) const {
    auto node = top_;
    for (const auto& part : fs::relative(path, root_))
      if (part != ".") node = node->entries.at(part.string());
    return node;
  }
  void step() {
    if (done_++ >= at_) fail(ErrorCode::io, "injected: power is gone");
  }
  static void put(const Node& node, const fs::path& into, std::mt19937& random) {
    fs::create_directories(into);
    // A rename shows as one name gone and another come with the same node: both or neither.
    std::set<std::string> names;
    for (const auto& [name, child] : node.entries) names.insert(name);
    for (const auto& [name, child] : node.durable_entries) names.insert(name);
    std::map<const Node*, bool> fresh;
    for (const auto& name : names) {
      const auto now = node.entries.find(name), before = node.durable_entries.find(name);
      const Node* key = now != node.entries.end() ? now->second.get() : before->second.get();
      if (!fresh.count(key)) fresh[key] = random() % 2;
    }
    for (const auto& name : names) {
      const auto now = node.entries.find(name), before = node.durable_entries.find(name);
      const bool same =
          now != node.entries.end() && before != node.durable_entries.end() && now->second == before->second;
      const Node* key = now != node.entries.end() ? now->second.get() : before->second.get();
      std::shared_ptr<Node> child;
      if (same || fresh[key])
        child = now != node.entries.end() ? now->second : nullptr;
      else
        child = before != node.durable_entries.end() ? before->second : nullptr;
      if (!child) continue;
      if (child->directory) {
        put(*child, into / name, random);
        continue;
      }
      std::string content = child->durable_content;
      if (content != child->content) {
        content = child->content.substr(0, random() % (child->content.size() + 1));
        if (!content.empty() && random() % 2)
          content[random() % content.size()] = '\0';  // a page that never arrived
      }
      spill(into / name, content);
    }
  }

  fs::path root_;
  std::shared_ptr<Node> top_;
  int64_t done_ = 0, at_ = INT64_MAX;
};

// The first element of `w` of the newest checkpoint that verifies, which tells saves apart; -1 where there is
// none.
float newest(const fs::path& root) {
  const Search search = find_latest(root, Depth::content);
  if (!search.found) return -1;
  Reader reader = Reader::open(search.found->path, Depth::content);
  std::vector<float> w(15);
  reader.read("w", DType::f32, room_of(w));
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
      for (const auto& refused : find_latest(root.path(), Depth::content).refused) {
        CAPTURE(refused.reason);
        REQUIRE(false);  // nothing half done may look like a checkpoint
      }
      // The next process clears up and saves as if nothing had been.
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
  writer.add("w", DType::f32, {3, 5}, whole({3, 5}), bytes_of(values));
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
      disk.materialise(after.path(), random);
      const float found = newest(after.path() / "c");
      CAPTURE(n);
      CAPTURE(committed);
      // What a save reported as done is there; the one in flight may be.
      REQUIRE((found == committed || found == (committed < 0 ? 100 : committed + 100)));
    }
  }
}

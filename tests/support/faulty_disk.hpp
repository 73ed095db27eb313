// Disks that do what disks do at the worst moment: file systems for the seam of
// src/checkpoint/file_system.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "base/error.hpp"
#include "checkpoint/file_system.hpp"

namespace capstan::checkpoint::test {

namespace fs = std::filesystem;

// Does what the real one does; tests override operations.
class PassingDisk : public FileSystem {
 public:
  std::unique_ptr<File> create(const fs::path& path) override { return real_file_system().create(path); }
  void make_directories(const fs::path& path) override { real_file_system().make_directories(path); }
  void sync_directory(const fs::path& path) override { real_file_system().sync_directory(path); }
  void rename_new(const fs::path& from, const fs::path& to) override {
    real_file_system().rename_new(from, to);
  }
  bool exchange(const fs::path& a, const fs::path& b) override { return real_file_system().exchange(a, b); }
  void remove_file(const fs::path& path) override { real_file_system().remove_file(path); }
  void remove_directory(const fs::path& path) override { real_file_system().remove_directory(path); }
};

// Counts operations. At the n-th the disk refuses: once (an error), from then on (the process died, its last
// write torn or not), or it is full from then on until cure(): what needs space fails, a write after half of
// it, removing works.
class FailingDisk final : public FileSystem {
 public:
  enum class Mode { count, error_once, dead, torn_then_dead, full };
  // `counter`, when given, is in memory that several processes share: they write to one disk, and it is their
  // n-th operation.
  FailingDisk(Mode mode, int64_t at, std::atomic<int64_t>* counter = nullptr)
      : mode_(mode), at_(at), done_(counter ? *counter : own_) {}
  int64_t operations() const { return done_; }
  void cure() { mode_ = Mode::count; }

  std::unique_ptr<File> create(const fs::path& path) override {
    step(true);
    return std::make_unique<FailingFile>(*this, real_file_system().create(path));
  }
  void make_directories(const fs::path& path) override {
    step(true);
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
      disk_.step(true, [&] { file_->write(bytes.first(bytes.size() / 2)); });
      file_->write(bytes);
    }
    void finish() override {
      disk_.step(true);
      file_->finish();
    }

   private:
    FailingDisk& disk_;
    std::unique_ptr<File> file_;
  };

  void step(
      bool needs_room = false, const std::function<void()>& tear = [] {}) {
    const int64_t now = done_++;
    const Mode mode = mode_;
    if (mode == Mode::count || now < at_) return;
    if (mode == Mode::full && !needs_room) return;
    if (mode == Mode::full || (now == at_ && mode == Mode::torn_then_dead)) tear();
    if (now == at_ || mode != Mode::error_once) fail(ErrorCode::io, "injected: no space left on device");
  }

  std::atomic<Mode> mode_;
  int64_t at_;
  std::atomic<int64_t> own_{0};
  std::atomic<int64_t>& done_;
};

// The possible contents after a power failure: file contents and directory entries reach the disk when they
// are synced, and otherwise in part, in any order. The disk model keeps, for each directory, the entries that
// are durable and the changes since.
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
  // gone or (a file) truncated anywhere, by chance. A rename within one directory is one change: on the disk
  // or not.
  void materialize(const fs::path& into, std::mt19937& random) const { put(*top_, into, random); }

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
        // A page that never arrived.
        if (!content.empty() && random() % 2) content[random() % content.size()] = '\0';
      }
      std::ofstream(into / name, std::ios::binary | std::ios::trunc) << content;
    }
  }

  fs::path root_;
  std::shared_ptr<Node> top_;
  int64_t done_ = 0, at_ = INT64_MAX;
};

}  // namespace capstan::checkpoint::test

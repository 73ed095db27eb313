#include "comm/watchdog/rank_status.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan::comm {

struct alignas(alignof(Slot)) RankStatusTable::Header {
  // Identifies this layout of the memory.
  static constexpr uint64_t kMagic = 0x72616e6b'73303034;  // "ranks004"
  std::atomic<uint64_t> magic;
  // Claim: 0 free, 1 taken, 2 the report is complete.
  std::atomic<int32_t> ranks, parent, claim;
  // Message, help and context lines, separated by kSeparator.
  std::array<char, 8192> report;
};

namespace {

constexpr char kSeparator = '\x1f';
constexpr int kMaxRanks = 65536;
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free,
              "processes share them");

[[noreturn]] void fail_system(const std::string& what, const std::filesystem::path& path) {
  fail(ErrorCode::io, what + " `" + path.string() + "`: " + system_error_text(errno));
}
// The memory of a file descriptor, shared by all processes that open the file.
void* map_shared(int fd, size_t bytes, const std::filesystem::path& path) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) fail_system("cannot map the rank status table", path);
  return memory;
}

}  // namespace

std::string_view name_of(Call call) {
  constexpr std::array<std::string_view, 9> names{"none",    "all_gather", "all_to_all", "broadcast", "send",
                                                  "receive", "barrier",    "split",      "finalize"};
  return names[static_cast<size_t>(call)];
}

int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

RankStatusTable::RankStatusTable(std::filesystem::path path, void* memory, size_t bytes)
    : path_(std::move(path)), memory_(memory), bytes_(bytes) {}
RankStatusTable::~RankStatusTable() {
  ::munmap(memory_, bytes_);
}

Slot* RankStatusTable::slots() const {
  static_assert(sizeof(Header) % alignof(Slot) == 0);
  return reinterpret_cast<Slot*>(static_cast<std::byte*>(memory_) + sizeof(Header));
}

std::unique_ptr<RankStatusTable> RankStatusTable::create(int ranks, bool parent) {
  // In a memory file system where there is one, so that status updates never reach a disk.
  std::error_code unknown;
  const std::filesystem::path shared = "/dev/shm";
  const bool usable = std::filesystem::is_directory(shared, unknown) && ::access(shared.c_str(), W_OK) == 0;
  std::string name =
      ((usable ? shared : std::filesystem::temp_directory_path()) / "capstan-rank-status-XXXXXX").string();
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) fail_system("cannot create the rank status table", name);
  const FileDescriptor descriptor(fd);
  const size_t bytes = sizeof(Header) + static_cast<size_t>(ranks) * sizeof(Slot);
  void* memory = nullptr;
  try {
    // Reserve the space now; a full file system would otherwise kill the process at a store.
    if (const int code = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes)); code != 0) {
      errno = code;
      fail_system("no space for the rank status table", name);
    }
    memory = map_shared(fd, bytes, name);
  } catch (...) {
    ::unlink(name.c_str());
    throw;
  }
  std::unique_ptr<RankStatusTable> status_table(new RankStatusTable(name, memory, bytes));
  status_table->header().ranks = ranks;
  status_table->header().parent = parent ? 1 : 0;
  status_table->header().magic = Header::kMagic;
  return status_table;
}

std::unique_ptr<RankStatusTable> RankStatusTable::open(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) fail_system("cannot open the rank status table", path);
  const FileDescriptor descriptor(fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail_system("cannot look at the rank status table", path);
  const auto bytes = static_cast<size_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || bytes < sizeof(Header))
    fail(ErrorCode::format, "`" + path.string() + "` is not a rank status table");
  std::unique_ptr<RankStatusTable> status_table(
      new RankStatusTable(path, map_shared(fd, bytes, path), bytes));
  const int ranks = status_table->header().ranks;
  if (status_table->header().magic != Header::kMagic || ranks < 1 || ranks > kMaxRanks ||
      bytes != sizeof(Header) + static_cast<size_t>(ranks) * sizeof(Slot))
    fail(ErrorCode::format, "`" + path.string() + "` is not a rank status table of this version");
  return status_table;
}

void RankStatusTable::unlink() {
  ::unlink(path_.c_str());
}
int RankStatusTable::ranks() const {
  return header().ranks;
}
bool RankStatusTable::has_parent() const {
  return header().parent != 0;
}

std::array<char, 17> RankStatusTable::phase_of(const Slot& slot) {
  std::array<char, 17> phase{};
  for (size_t i = 0; i < 2; ++i) {
    const uint64_t part = slot.phase[i];
    std::memcpy(phase.data() + 8 * i, &part, 8);
  }
  return phase;
}

RankStatus RankStatusTable::read(int index, int64_t not_before_ns) const {
  const Slot& slot = slots()[index];
  const auto text_of = [](const auto& characters) {
    return std::string(characters.data(), ::strnlen(characters.data(), characters.size()));
  };
  RankStatus status;
  status.state = static_cast<RankState>(slot.state.load(std::memory_order_acquire));
  status.rank = slot.rank;
  status.pid = slot.pid;
  status.host = text_of(slot.host);
  const int64_t now = monotonic_ns();
  status.seconds = 1e-9 * static_cast<double>(now - std::max(slot.since.load(), not_before_ns));
  status.heartbeat = slot.heartbeat;
  status.step = slot.step;
  status.phase = text_of(phase_of(slot));
  status.call = static_cast<Call>(slot.call.load());
  status.peer = slot.peer;
  status.sequence = slot.sequence;
  status.bytes = slot.bytes;
  const int current = slot.group;
  if (current >= 0 && current < static_cast<int>(Slot::kGroups)) {
    status.group = text_of(slot.groups[static_cast<size_t>(current)].name);
    status.first = slot.groups[static_cast<size_t>(current)].first;
  }
  for (const GroupSlot& entry : slot.groups) {
    if (entry.name[0] == '\0') continue;
    RankStatus::Group group{text_of(entry.name), entry.first, entry.sequence};
    const DeviceBatches& batches = entry.batches;
    group.started = batches.started, group.done = batches.done;
    group.begun = batches.begun.load(std::memory_order_acquire);
    if (group.in_batch()) {
      group.seconds = 1e-9 * static_cast<double>(now - std::max(batches.since.load(), not_before_ns));
      group.text = text_of(batches.text);
    }
    status.groups.push_back(std::move(group));
  }
  return status;
}

bool RankStatusTable::claim_report() {
  int32_t free = 0;
  return header().claim.compare_exchange_strong(free, 1);
}
bool RankStatusTable::report_claimed() const {
  return header().claim != 0;
}

void RankStatusTable::write_report(const Error& error) {
  std::string text = error.message() + kSeparator + error.marked_help();
  for (const std::string& line : error.context()) text += kSeparator + line;
  text.resize(std::min(text.size(), header().report.size() - 1));
  std::copy(text.begin(), text.end(), header().report.begin());
  header().report[text.size()] = '\0';
  header().claim = 2;
}

std::optional<Error> RankStatusTable::report() const {
  if (header().claim != 2) return std::nullopt;
  const std::string text(header().report.data());
  std::vector<std::string> parts;
  for (const std::string_view part : split(text, kSeparator)) parts.emplace_back(part);
  parts.resize(std::max<size_t>(parts.size(), 2));
  Error error(ErrorCode::rank_failure, parts[0], parts[1]);
  for (size_t i = 2; i < parts.size(); ++i) error.in(parts[i]);
  return error;
}

}  // namespace capstan::comm

#include "train/records/metrics.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::records {

namespace fs = std::filesystem;

MetricsRow& MetricsRow::raw(std::string_view name, std::string_view value) {
  if (!body_.empty()) body_ += ", ";
  body_ += in_quotes(name) + ": ";
  body_ += value;
  return *this;
}
MetricsRow& MetricsRow::number(std::string_view name, double value) {
  return raw(name, std::isfinite(value) ? to_text(value) : "null");
}
MetricsRow& MetricsRow::number(std::string_view name, float value) {
  if (!std::isfinite(value)) return raw(name, "null");
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return raw(name, {buffer.data(), static_cast<size_t>(end - buffer.data())});
}
MetricsRow& MetricsRow::numbers(std::string_view name, std::span<const double> values) {
  std::string list;
  for (const double value : values)
    list += (list.empty() ? "" : ", ") + (std::isfinite(value) ? to_text(value) : std::string("null"));
  return raw(name, "[" + list + "]");
}
MetricsRow& MetricsRow::integer(std::string_view name, int64_t value) {
  return raw(name, std::to_string(value));
}
MetricsRow& MetricsRow::boolean(std::string_view name, bool value) {
  return raw(name, value ? "true" : "false");
}
MetricsRow& MetricsRow::text(std::string_view name, std::string_view value) {
  // A path or a message may hold any bytes, JSON may not.
  std::string valid;
  for (size_t at = 0; at < value.size();) {
    const CodePoint point = decode_utf8(value, at);
    append_utf8(valid, point.value);
    at += static_cast<size_t>(point.bytes);
  }
  return raw(name, in_quotes(valid));
}

MetricsWriter::MetricsWriter(const fs::path& path)
    : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
  if (fd_ < 0) fail(ErrorCode::io, "cannot open `" + path.string() + "`: " + system_error_text(errno));
}
MetricsWriter::~MetricsWriter() {
  if (fd_ >= 0) ::close(fd_);
}
void MetricsWriter::write(const MetricsRow& row) {
  const std::string line = row.line();
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = ::write(fd_, line.data() + done, line.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const int error = errno;
      // A torn row that cannot be taken back is ended, so that the next one stands on a line of its own.
      if (done > 0 && (before < 0 || ::ftruncate(fd_, before) != 0))
        done = static_cast<size_t>(::write(fd_, "\n", 1) > 0);
      fail(ErrorCode::io, "cannot write `" + path_.string() + "`: " + system_error_text(error));
    }
    done += static_cast<size_t>(put);
  }
}
void MetricsWriter::sync() {
  if (::fdatasync(fd_) != 0)
    fail(ErrorCode::io, "cannot sync `" + path_.string() + "`: " + system_error_text(errno));
}

double ReadRow::number(std::string_view name) const {
  for (const auto& [key, value] : numbers)
    if (key == name) return value;
  return std::numeric_limits<double>::quiet_NaN();
}

double ReadRow::memory_bytes() const {
  const double kernels = number("kernel_scratch_bytes");
  return number("memory_bytes") + (std::isfinite(kernels) ? kernels : 0);
}

static double number_of(const Json& item) {
  return item.is_number() ? item.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

static std::optional<ReadRow> parse_row(std::string_view line) {
  const Json value = json_of(line, IfNotJson::discard);
  if (!value.is_object()) return std::nullopt;
  ReadRow row;
  for (const auto& [name, item] : value.items()) {
    if (name == "step" && item.is_number_integer())
      row.step = item.get<int64_t>();
    else if (name == "event" && item.is_string())
      row.event = item.get<std::string>();
    else if (item.is_number() || item.is_null())
      row.numbers.emplace_back(name, number_of(item));
    else if (item.is_boolean())
      row.numbers.emplace_back(name, item.get<bool>() ? 1 : 0);
    else if (item.is_string())
      row.texts.emplace_back(name, item.get<std::string>());
    else if (item.is_array())
      for (std::vector<double>& list = row.lists.emplace_back(name, std::vector<double>()).second;
           const Json& number : item)
        list.push_back(number_of(number));
  }
  return row;
}

// Calls use(line, begin, complete) for the lines of `text`, without their ends; stops when it returns false.
template <class Use>
static void for_each_line(std::string_view text, Use use) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const bool complete = end != std::string_view::npos;
    if (!use(text.substr(begin, complete ? end - begin : std::string_view::npos), begin, complete)) return;
    begin = complete ? end + 1 : text.size();
  }
}

static std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

int64_t truncate_after_step(const fs::path& path, int64_t step) {
  std::error_code error;
  if (!fs::exists(path, error)) return 0;
  // Bytes up to the end of the last row that stays.
  size_t keep = 0;
  int64_t removed = 0, within = 0;
  std::string kept;
  {
    const MappedFile file(path);
    const std::string_view text = as_text(file.bytes());
    // A row without a step belongs to the step of the row before.
    bool within_step = true;
    const auto stays = [&](std::string_view line, bool complete) {
      if (const auto row = parse_row(line); row && row->step) within_step = *row->step <= step;
      return complete && within_step;
    };
    for_each_line(text, [&](std::string_view line, size_t begin, bool complete) {
      if (stays(line, complete))
        keep = begin + line.size() + 1, within = removed;
      else
        ++removed;
      return true;
    });
    // A row of a later step before rows that stay: no run wrote it so. It goes alone.
    within_step = true;
    if (within > 0)
      for_each_line(text, [&](std::string_view line, size_t, bool complete) {
        if (stays(line, complete)) kept.append(line).push_back('\n');
        return true;
      });
  }
  if (removed == 0) return 0;
  if (within > 0) {
    write_file_durably(path.string(), kept);
    return removed;
  }
  const FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(keep)) != 0 || ::fsync(file.get()) != 0)
    fail(ErrorCode::io, "cannot truncate `" + path.string() + "`: " + system_error_text(errno));
  return removed;
}

int64_t read_metrics(const fs::path& path, FunctionRef<void(const ReadRow&)> use) {
  const MappedFile file(path);
  int64_t skipped = 0;
  for_each_line(as_text(file.bytes()), [&](std::string_view line, size_t, bool) {
    if (line.empty()) return true;
    if (const auto row = parse_row(line))
      use(*row);
    else
      ++skipped;
    return true;
  });
  return skipped;
}

// The last row in the last `most` bytes that `wanted` takes. `mark`: what its line holds, so that others are
// not parsed.
static std::optional<ReadRow> last_row(const fs::path& path, size_t most, std::string_view mark,
                                       FunctionRef<bool(const ReadRow&)> wanted) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return std::nullopt;
  const MappedFile file(path);
  std::string_view text = as_text(file.bytes());
  if (text.size() > most) text.remove_prefix(text.size() - most);
  while (!text.empty()) {
    if (text.back() == '\n') text.remove_suffix(1);
    const size_t begin = text.rfind('\n');
    const std::string_view line = begin == std::string_view::npos ? text : text.substr(begin + 1);
    if (line.find(mark) != std::string_view::npos)
      if (auto row = parse_row(line); row && row->step && wanted(*row)) return row;
    if (begin == std::string_view::npos) break;
    text = text.substr(0, begin + 1);
  }
  return std::nullopt;
}

// More than a row of any model has: the loads of 61 layers of 256 experts take 330 KiB.
constexpr size_t kLastRows = size_t{4} << 20;

std::optional<ReadRow> last_logged_step(const fs::path& path) {
  return last_row(path, kLastRows, "", [](const ReadRow& row) { return row.event.empty(); });
}

std::optional<ReadRow> last_recorded_step(const fs::path& path) {
  return last_row(path, kLastRows, "", [](const ReadRow&) { return true; });
}

std::optional<ReadRow> last_event(const fs::path& path, std::string_view event) {
  return last_row(path, SIZE_MAX, event, [&](const ReadRow& row) { return row.event == event; });
}

}  // namespace capstan::records

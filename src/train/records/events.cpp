#include "train/records/events.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/utf8.hpp"

namespace capstan::records {

namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

template <class T>
void put_fixed(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  std::array<char, sizeof(T)> bytes;
  std::memcpy(bytes.data(), &value, sizeof(T));
  out.append(bytes.data(), bytes.size());
}
void put_varint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out += static_cast<char>(value | 128);
  out += static_cast<char>(value);
}
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
void put_key(std::string& out, uint32_t field, Wire wire) {
  put_varint(out, field << 3 | wire);
}
void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

// Event: 1 wall_time, 2 step (absent when 0, as proto3 has it).
std::string event_head(double wall_time, int64_t step) {
  std::string event;
  if (std::bit_cast<uint64_t>(wall_time) != 0) {
    put_key(event, 1, kFixed64);
    put_fixed(event, wall_time);
  }
  if (step != 0) {
    put_key(event, 2, kVarint);
    put_varint(event, static_cast<uint64_t>(step));
  }
  return event;
}

std::string safe_tag(std::string_view tag) {
  std::string result;
  for (size_t at = 0; at < tag.size();) {
    const CodePoint point = decode_utf8(tag, at);
    std::string character(tag.substr(at, static_cast<size_t>(point.bytes)));
    if (point.value < 0x20 || point.value == 0x7F || (point.value == 0xFFFD && point.bytes == 1))
      character = "_";
    if (result.size() + character.size() > 512) break;
    result += character;
    at += static_cast<size_t>(point.bytes);
  }
  return result;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 255u];
  return ~crc;
}

static uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

std::string frame_record(std::string_view data) {
  std::string record;
  put_fixed(record, static_cast<uint64_t>(data.size()));
  put_fixed(record, masked_crc(record));
  record += data;
  put_fixed(record, masked_crc(data));
  return record;
}

std::string version_event(double wall_time) {
  std::string event = event_head(wall_time, 0);
  put_bytes(event, 3, "brain.Event:2");
  return event;
}

std::string session_start_event(double wall_time, int64_t step) {
  // SessionLog: 1 status (1 START).
  std::string log;
  put_key(log, 1, kVarint);
  put_varint(log, 1);
  std::string event = event_head(wall_time, step);
  put_bytes(event, 7, log);
  return event;
}

// A field of a message; absent when 0, as proto3 has it.
static void put_double(std::string& out, uint32_t field, double value) {
  if (std::bit_cast<uint64_t>(value) == 0) return;
  put_key(out, field, kFixed64);
  put_fixed(out, value);
}
static void put_doubles(std::string& out, uint32_t field, std::span<const double> values) {
  std::string packed;
  for (const double value : values) put_fixed(packed, value);
  put_bytes(out, field, packed);
}

// HistogramProto: 1 min, 2 max, 3 num, 4 sum, 5 sum_squares, 6 bucket_limit (the upper ends), 7 bucket.
static std::string histogram_message(const std::vector<double>& values) {
  constexpr size_t kBuckets = 30;
  std::string message;
  if (values.empty()) return message;
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const size_t buckets = *high > *low ? kBuckets : 1;
  const double width = (*high - *low) / static_cast<double>(buckets);
  std::vector<double> limits(buckets), counts(buckets);
  for (size_t i = 0; i < buckets; ++i) limits[i] = *low + width * static_cast<double>(i + 1);
  limits.back() = *high;
  double sum = 0, squares = 0;
  for (const double value : values) {
    sum += value, squares += value * value;
    const size_t bucket = width > 0 ? static_cast<size_t>((value - *low) / width) : 0;
    ++counts[std::min(bucket, buckets - 1)];
  }
  put_double(message, 1, *low), put_double(message, 2, *high);
  put_double(message, 3, static_cast<double>(values.size()));
  put_double(message, 4, sum), put_double(message, 5, squares);
  put_doubles(message, 6, limits), put_doubles(message, 7, counts);
  return message;
}

std::string summary_event(double wall_time, int64_t step, std::span<const Scalar> scalars,
                          std::span<const Histogram> histograms) {
  // Summary: 1 repeated Value {1 tag, 2 simple_value, 5 histo}.
  std::string summary;
  const auto begin_value = [](const std::string& name) {
    std::string value;
    if (const std::string tag = safe_tag(name); !tag.empty()) put_bytes(value, 1, tag);
    return value;
  };
  for (const auto& scalar : scalars) {
    std::string value = begin_value(scalar.tag);
    put_key(value, 2, kFixed32);
    put_fixed(value, static_cast<float>(scalar.value));
    put_bytes(summary, 1, value);
  }
  for (const auto& histogram : histograms) {
    std::string value = begin_value(histogram.tag);
    put_bytes(value, 5, histogram_message(histogram.values));
    put_bytes(summary, 1, value);
  }
  std::string event = event_head(wall_time, step);
  put_bytes(event, 5, summary);
  return event;
}

EventsWriter::EventsWriter(const std::filesystem::path& directory, double wall_time,
                           std::optional<int64_t> resumed_at) {
  std::error_code ignored;
  // The open below reports what matters.
  std::filesystem::create_directories(directory, ignored);
  std::string host = host_name();
  if (host.empty()) host = "localhost";
  std::array<char, 32> seconds;
  std::snprintf(seconds.data(), seconds.size(), "%010lld", static_cast<long long>(wall_time));
  for (int n = 0; fd_ < 0; ++n) {
    path_ = directory / ("events.out.tfevents." + std::string(seconds.data()) + "." + host + "." +
                         std::to_string(::getpid()) + "." + std::to_string(n));
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (fd_ < 0 && errno != EEXIST)
      fail(ErrorCode::io, "cannot create `" + path_.string() + "`: " + system_error_text(errno));
  }
  append(version_event(wall_time));
  // TensorBoard hides what has this step or a later one.
  if (resumed_at) append(session_start_event(wall_time, *resumed_at + 1));
}

EventsWriter::~EventsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void EventsWriter::write(int64_t step, double wall_time, std::span<const Scalar> scalars,
                         std::span<const Histogram> histograms) {
  if (!scalars.empty() || !histograms.empty()) append(summary_event(wall_time, step, scalars, histograms));
}

void EventsWriter::append(std::string_view event) {
  const std::string record = frame_record(event);
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  size_t done = 0;
  while (done < record.size()) {
    const ssize_t put = ::write(fd_, record.data() + done, record.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const int error = errno;
      // Half a record would hide all that come after it.
      if (before >= 0 && ::ftruncate(fd_, before) != 0) done = 0;
      fail(ErrorCode::io, "cannot write `" + path_.string() + "`: " + system_error_text(error));
    }
    done += static_cast<size_t>(put);
  }
}

}  // namespace capstan::records

// TensorBoard event files: TFRecord frames around Event messages, of which a trainer needs three kinds. This
// file encodes the protocol buffers itself (varints, little-endian fixed words, length-delimited strings).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::records {

struct Scalar {
  std::string tag;
  // Stored as float; NaN and infinities too.
  double value = 0;
};

// The distribution of finite values.
struct Histogram {
  std::string tag;
  std::vector<double> values;
};

// One event file. Appends complete records with one write each, so that a reader that follows the file sees
// incomplete events only if the process dies within a write, which readers tolerate.
class EventsWriter {
 public:
  // Creates DIRECTORY/events.out.tfevents.<seconds>.<host>.<pid>.<n>; a resumed run writes another file
  // beside the older ones, whose events after `resumed_at` are then hidden by TensorBoard. Times are seconds
  // since 1970.
  EventsWriter(const std::filesystem::path& directory, double wall_time,
               std::optional<int64_t> resumed_at = {});
  ~EventsWriter();
  EventsWriter(const EventsWriter&) = delete;
  EventsWriter& operator=(const EventsWriter&) = delete;

  void write(int64_t step, double wall_time, std::span<const Scalar> scalars,
             std::span<const Histogram> histograms = {});
  const std::filesystem::path& path() const { return path_; }

 private:
  void append(std::string_view event);
  std::filesystem::path path_;
  int fd_ = -1;
};

// The functions below are public for tests.
uint32_t crc32c(std::string_view bytes);
// A record: length, masked CRC of the length, data, masked CRC of the data.
std::string frame_record(std::string_view data);
// The first event of every file.
std::string version_event(double wall_time);
std::string session_start_event(double wall_time, int64_t step);
// An event with scalars, then histograms of 30 buckets of equal width between the least and the greatest
// value, of one bucket if these are equal. Tags are sanitized: control characters and bytes that are not
// UTF-8 become `_`, at most 512 bytes.
std::string summary_event(double wall_time, int64_t step, std::span<const Scalar> scalars,
                          std::span<const Histogram> histograms = {});

}  // namespace capstan::records

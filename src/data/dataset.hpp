// What training, validation and test read: rows by number. GptDataset and SftDataset are its kinds.
#pragma once

#include <cstdint>
#include <string>

#include "data/sample.hpp"

namespace capstan::data {

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t sequence_length() const = 0;
  virtual int64_t samples() const = 0;        // row numbers are [0, samples()); SampleSource::kEndless
  virtual int64_t epoch_samples() const = 0;  // rows of the first pass over the data
  // What row `number` holds depends on nothing but the dataset and the number. Thread-safe.
  virtual void row(int64_t number, const RowView& out) const = 0;
  // A hash of which samples these are and how they are laid out, 16 digits. Other places of the same files do not change it.
  virtual std::string fingerprint() const = 0;
  // What people should know of it before a run, one line: counts, and what was left out. Empty: nothing.
  virtual std::string summary() const { return {}; }
};

}  // namespace capstan::data

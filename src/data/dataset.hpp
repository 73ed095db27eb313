// The interface of the datasets for training, validation and test: rows by number.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/sample.hpp"

namespace capstan::data {

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t sequence_length() const = 0;
  // Row numbers are [0, samples()), or unlimited for SampleSource::kEndless.
  virtual int64_t samples() const = 0;
  // Rows of the first pass over the data.
  virtual int64_t epoch_samples() const = 0;
  // Rows of that many passes, rounded up.
  virtual int64_t samples_in(double epochs) const;
  virtual std::vector<DatasetShare> parts() const { return {{{}, epoch_samples(), 1}}; }
  // Writes row `number`. Its content depends on the dataset and the number alone. Thread-safe.
  virtual void row(int64_t number, const RowView& out) const = 0;
  // A hash of the samples and their layout, 16 digits. It does not depend on the paths of the files.
  virtual std::string fingerprint() const = 0;
  // One line for the log at the start of a run, with counts of samples and of dropped samples. May be empty.
  virtual std::string summary() const { return {}; }
  // Problems in some of the data, one line each.
  virtual std::vector<std::string> warnings() const { return {}; }
  // Adds the bytes of data that it holds in memory, by the object that has them, which datasets may share.
  virtual void add_memory(std::map<const void*, int64_t>&) const {}
};

// The number of epochs that a run of `samples` rows makes over the source that it repeats most; nullopt for
// generated data.
struct Passes {
  DatasetShare part;
  double count = 0;
};
std::optional<Passes> most_passes(const Dataset& dataset, int64_t samples);

}  // namespace capstan::data

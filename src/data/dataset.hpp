// What training, validation and test read: rows by number. GptDataset and SftDataset are its kinds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/sample.hpp"

namespace capstan::data {

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t sequence_length() const = 0;
  virtual int64_t samples() const = 0;        // row numbers are [0, samples()); SampleSource::kEndless
  virtual int64_t epoch_samples() const = 0;  // rows of the first pass over the data
  // Rows of that many passes, rounded up.
  virtual int64_t samples_in(double epochs) const;
  virtual std::vector<SourcePart> parts() const { return {{{}, epoch_samples(), 1}}; }
  // What row `number` holds depends on nothing but the dataset and the number. Thread-safe.
  virtual void row(int64_t number, const RowView& out) const = 0;
  // A hash of which samples these are and how they are laid out, 16 digits. Other places of the same files do not change it.
  virtual std::string fingerprint() const = 0;
  // What people should know of it before a run, one line: counts, and what was left out. Empty: nothing.
  virtual std::string summary() const { return {}; }
  // What is wrong with some of the data, a line each.
  virtual std::vector<std::string> warnings() const { return {}; }
};

// The passes that a run of so many samples makes over the part that it sees most often; nullopt for generated data.
struct Passes {
  SourcePart part;
  double count = 0;
};
std::optional<Passes> most_passes(const Dataset& dataset, int64_t samples);

}  // namespace capstan::data

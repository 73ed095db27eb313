// A mode for tests of real sizes, which take too long to run completely: of each launch only some blocks run,
// while the grid, the arguments and the arrays are the real ones. Results are not; such a run shows accesses
// outside of arrays, and numbers that are too large for their type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/simulated/location.hpp"

namespace capstan::kernels::simulated {

// Launches that a process and those that it has forked have run. The processes run one after the other.
class SharedLaunches {
 public:
  SharedLaunches();
  ~SharedLaunches();
  SharedLaunches(const SharedLaunches&) = delete;
  SharedLaunches& operator=(const SharedLaunches&) = delete;

  bool contains(uint64_t digest) const;
  // Once kCapacity is reached it forgets what is added.
  void add(uint64_t digest);

 private:
  static constexpr uint64_t kCapacity = uint64_t{1} << 18;
  // The place of a digest, or the free one where it would be; null: there is neither.
  uint64_t* place_of(uint64_t digest) const;

  uint64_t* places_;  // memory of all these processes; 0: free
};

struct Sample {
  // Blocks of a launch that run: the first, the last, and others by `seed`.
  int64_t blocks = 4;
  // Launches with up to so many threads run completely: small ones compute the bounds of others' loops.
  int64_t complete = 8192;
  uint64_t seed = 1;
  // Barriers and warp operations of all threads of a block, after which the rest of the block does not run.
  int64_t waits = int64_t{1} << 18;
  // Launches of one kernel with one grid that run, of those whose arguments differ, as by the keys of random
  // numbers.
  int launches = 4;
  // A launch that another of these processes has run, on a GPU of the same capability, does not run again,
  // unless it runs completely. Null: none.
  SharedLaunches* shared = nullptr;
};

// While an object of this class exists, launches of the process run a sample of their blocks. A launch that
// differs from an earlier one in addresses only, with the same alignment, does not run again. GEMMs of
// cuBLASLt read and write the ends of their matrices. For one thread of the host.
class SampledLaunches {
 public:
  explicit SampledLaunches(const Sample& sample);
  ~SampledLaunches();
  SampledLaunches(const SampledLaunches&) = delete;
  SampledLaunches& operator=(const SampledLaunches&) = delete;
};

// The current sample; null: launches run completely.
const Sample* current_sample();
// The blocks of a launch that belong to the sample, in ascending order. blocks: of the launch.
std::vector<int64_t> sampled_blocks(const Sample& sample, int64_t blocks, int threads);

// Digest of what identifies a launch.
class LaunchDigest {
 public:
  void add(uint64_t word);
  // Bytes of an argument. A word with a value of addresses is taken as one, of which only the last eight bits
  // count.
  void add(const void* argument, size_t bytes);
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325;
};
// Whether a launch of so many threads belongs to the sample, by those that ran before. grid: digest of the
// kernel and its grid. all: with the arguments.
bool joins_sample(const LaunchDigest& grid, const LaunchDigest& all, int64_t threads);

// The launch whose blocks this thread runs, for reports of faults: "kernels/cuda/norm.cu:52: block 7 of 100".
// Empty: none.
std::string running_launch_text();

}  // namespace capstan::kernels::simulated

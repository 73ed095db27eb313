#include "kernels/simulated/sample.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/error.hpp"
#include "kernels/simulated/block.hpp"
#include "kernels/simulated/cublaslt.hpp"

namespace capstan::kernels::simulated {

namespace {
std::optional<Sample> sample;
// Launches of the sample so far, and their numbers by grid.
std::unordered_set<uint64_t> launches;
std::unordered_map<uint64_t, int> of_grid;
}  // namespace

SharedLaunches::SharedLaunches() {
  void* const mapped = ::mmap(nullptr, kCapacity * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) fail(ErrorCode::no_fit, "no memory for the launches that processes share");
  places_ = static_cast<uint64_t*>(mapped);
}
SharedLaunches::~SharedLaunches() {
  ::munmap(places_, kCapacity * sizeof(uint64_t));
}
uint64_t* SharedLaunches::place_of(uint64_t digest) const {
  for (uint64_t i = 0; i < kCapacity; ++i) {
    uint64_t* const place = places_ + (digest + i) % kCapacity;
    if (*place == digest || *place == 0) return place;
  }
  return nullptr;
}
bool SharedLaunches::contains(uint64_t digest) const {
  const uint64_t* const place = place_of(digest);
  return place && *place == digest;
}
void SharedLaunches::add(uint64_t digest) {
  if (uint64_t* const place = place_of(digest)) *place = digest;
}

SampledLaunches::SampledLaunches(const Sample& wanted) {
  CAPSTAN_ASSERT(!sample && wanted.blocks >= 2, "one sample at a time, of two blocks or more");
  sample = wanted;
}
SampledLaunches::~SampledLaunches() {
  sample.reset();
  launches.clear();
  of_grid.clear();
}

const Sample* current_sample() {
  return sample ? &*sample : nullptr;
}

std::vector<int64_t> sampled_blocks(const Sample& wanted, int64_t blocks, int threads) {
  std::vector<int64_t> result;
  if (blocks <= std::max(wanted.blocks, wanted.complete / threads)) {
    for (int64_t i = 0; i < blocks; ++i) result.push_back(i);
    return result;
  }
  result = {0, blocks - 1};
  uint64_t state = wanted.seed;
  while (static_cast<int64_t>(result.size()) < wanted.blocks) {
    const auto block = static_cast<int64_t>(next_random(state) % static_cast<uint64_t>(blocks));
    if (std::ranges::find(result, block) == result.end()) result.push_back(block);
  }
  std::ranges::sort(result);
  return result;
}

void LaunchDigest::add(uint64_t word) {
  value_ = (value_ ^ word) * 0x100000001B3;
  value_ ^= value_ >> 29;
}
void LaunchDigest::add(const void* argument, size_t bytes) {
  // Where a program on Linux has its heap, its mappings and its stacks.
  constexpr uint64_t kFirstAddress = uint64_t{1} << 40, kLastAddress = uint64_t{1} << 47;
  const auto* from = static_cast<const std::byte*>(argument);
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + i, std::min(sizeof word, bytes - i));
    const bool is_address = word >= kFirstAddress && word < kLastAddress;
    add(is_address ? word & 0xFF : word);
  }
}

bool joins_sample(const LaunchDigest& grid, const LaunchDigest& all, int64_t threads) {
  if (!launches.insert(all.value()).second) return false;
  SharedLaunches* const shared = threads > sample->complete ? sample->shared : nullptr;
  LaunchDigest on_gpu = all;
  on_gpu.add(static_cast<uint64_t>(compute_capability()));
  if (shared && shared->contains(on_gpu.value())) return false;
  if (++of_grid[grid.value()] > sample->launches) return false;
  if (shared) shared->add(on_gpu.value());
  return true;
}

}  // namespace capstan::kernels::simulated

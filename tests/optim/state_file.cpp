// Optimizer state in a file: updates have the bits of those in memory, chunks may be used in any order, every
// wait between the queues is needed, and errors of the file say what is wrong with it.
#include "optim/state_file.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>

#include "kernels/table.hpp"
#include "offloadable.hpp"
#include "optim/optimizer.hpp"
#include "support/devices.hpp"
#include "support/errors.hpp"
#include "support/planted_waits.hpp"
#include "support/step_control.hpp"
#include "support/temporary_directory.hpp"
#include "tensor/launch.hpp"

using namespace capstan;
using optim::FlatBuffer;
using optim::StateFile;
namespace fs = std::filesystem;

namespace {

// Elements of the chunks, of which more exist than there is memory for.
constexpr int64_t kChunkSizes[] = {301, 64, 1173, 7, 1029, 128, 65};

std::vector<float> sine(int64_t n, double phase) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(std::sin(phase + static_cast<double>(i)));
  return values;
}

// Chunks whose state is updated on the host beside `device`: in memory, or in a file of `directory`.
class Chunks {
 public:
  Chunks(Device& device, const fs::path& directory, const config::OptimizerConfig& config, DType model)
      : device_(device), host_(device, kernels::cpu_table()) {
    const std::vector<int64_t> counts(std::begin(kChunkSizes), std::end(kChunkSizes));
    StateFile::Array main, models;
    if (!directory.empty()) {
      file_ = std::make_unique<StateFile>(host_, directory, "rank 3", counts.size());
      main = file_->add(DType::f32, counts);
      models = file_->add(model, counts, true);
    }
    std::vector<FlatBuffer> buffers;
    for (size_t i = 0; i < counts.size(); ++i) {
      const int64_t n = counts[i];
      FlatBuffer buffer{};
      buffer.main = file_ ? main.chunks[i] : Tensor::zeros(host_, {n});
      if (model != DType::f32) buffer.model = file_ ? models.chunks[i] : Tensor::zeros(host_, {n}, model);
      for (const auto& [begin, count] : {std::pair{int64_t{0}, n / 2}, {n / 2, n - n / 2}}) {
        kernels::UpdateRange& range = buffer.ranges.emplace_back();
        range.begin = begin, range.count = count;
      }
      buffer.host = &host_, buffer.file = file_.get(), buffer.chunk = buffer.bucket = i;
      buffer.device_gradients = Tensor::zeros(device, {n});
      buffer.device_parameters = Tensor::zeros(device, {n}, model);
      buffers.push_back(std::move(buffer));
    }
    optimizer_ = optim::build(config, device, buffers, 11);
    for (const FlatBuffer& buffer : optimizer_->buffers()) {
      load(buffer);
      const std::vector<float> first = sine(buffer.main.elements(), 1);
      buffer.main.copy_from_host_bytes(std::as_bytes(std::span(first)));
      if (file_) file_->set_changed(buffer.chunk, FlatBuffer::kMainArray);
    }
  }

  // Queues a step.
  void step(int64_t number, bool skipped) {
    for (const FlatBuffer& buffer : optimizer_->buffers()) {
      const Tensor& gradients = buffer.device_gradients;
      const auto values =
          sine(gradients.elements(), 7 * static_cast<double>(number) + static_cast<double>(buffer.chunk));
      gradients.copy_from_host_bytes(std::as_bytes(std::span(values)));
      launch(device_, device_.table().elementwise->scale, gradients, 0.5f, gradients.elements());
    }
    const Tensor control = test::step_control(device_, 0.25f, skipped);
    const int64_t waits = device_.host_waits();
    optimizer_->step({.lr = 0.1, .weight_decay = 0.1}, control);
    CHECK(device_.host_waits() == waits);
    for (const FlatBuffer& buffer : optimizer_->buffers()) {
      const Tensor& from = buffer.device_parameters;
      const Tensor& copy = seen_.emplace_back(Tensor::empty(device_, from.shape(), from.dtype()));
      device_.copy(copy.address(), from.address(), copy.bytes());
    }
  }
  // Parameters that the device has seen after each step, and the state, from the last chunk to the first.
  std::vector<float> values() {
    std::vector<float> all;
    const auto add = [&](const Tensor& tensor) {
      for (const float value : tensor.to_floats()) all.push_back(value);
    };
    for (const Tensor& tensor : seen_) add(tensor);
    for (size_t i = optimizer_->buffers().size(); i-- > 0;) {
      const FlatBuffer& buffer = optimizer_->buffers()[i];
      load(buffer);
      add(buffer.main);
      for (const auto& state : optimizer_->state())
        add(optimizer_->values(state, static_cast<int>(i), 0, buffer.main.elements()));
    }
    device_.synchronize();
    return all;
  }
  optim::Optimizer& optimizer() { return *optimizer_; }
  StateFile& file() { return *file_; }

 private:
  void load(const FlatBuffer& buffer) {
    if (buffer.file) buffer.file->load(buffer.chunk, FlatBuffer::kMainArray);
  }

  Device& device_;
  HostDevice host_;
  std::unique_ptr<StateFile> file_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<Tensor> seen_;
};

std::vector<float> updated(Device& device, const fs::path& directory, const config::OptimizerConfig& config,
                           DType model, int steps, int skipped = -1) {
  Chunks chunks(device, directory, config, model);
  for (int step = 0; step < steps; ++step) chunks.step(step, step == skipped);
  return chunks.values();
}

// The open file of this process that has no name in `directory`.
fs::path unnamed_file_in(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const std::string target = fs::read_symlink(entry.path(), closed).string();
    if (target.starts_with(directory.string() + "/") && target.ends_with(" (deleted)")) return entry.path();
  }
  return {};
}

}  // namespace

TEST_CASE("updates of state in a file have the bits of those in memory, also after a skipped step") {
  const test::TemporaryDirectory directory;
  for (const auto& config : test::offloadable_optimizers())
    for (const DType model : {DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(static_cast<int>(config.optimizer));
      CAPTURE(std::string(name_of(model)));
      const auto expected = updated(*test::Checked::make(1), {}, config, model, 4, 2);
      CHECK(updated(*test::Cpu::make(1), directory.path(), config, model, 4, 2) == expected);
      for (const bool patient : {false, true}) {
        const auto device = make_checked_device(kernels::cpu_table(), 1, {.patient = patient});
        CHECK(updated(*device, directory.path(), config, model, 4, 2) == expected);
      }
    }
}

TEST_CASE("state in a file is updated beside the CUDA kernels") {
  const test::TemporaryDirectory directory;
  const auto expected = updated(*test::Cpu::make(1), {}, test::kAdam, DType::bf16, 3);
  const auto found = updated(*test::Simulated::make({.threads = 1, .patient = true}), directory.path(),
                             test::kAdam, DType::bf16, 3);
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(0.01));
}

TEST_CASE("the checked device finds missing waits of updates in a file") {
  constexpr int64_t kWaits = 40;
  const test::TemporaryDirectory directory;
  for (const DType model : {DType::f32, DType::bf16}) {
    const auto expected = updated(*test::Cpu::make(1), {}, test::kAdam, model, 2);
    const auto work = [&](Device& device) {
      return updated(device, directory.path(), test::kAdam, model, 2);
    };
    int64_t needed = 0;
    for (int64_t ignored = 0; ignored < 2 * kWaits; ++ignored) {
      CAPTURE(ignored);
      const auto device =
          make_checked_device(kernels::cpu_table(), 1, {.patient = true, .ignored_wait = ignored});
      std::vector<float> values;
      const std::string error = test::error_of([&] { values = work(*device); });
      if (error.empty())
        CHECK(values == expected);
      else
        CHECK(error.find("missing wait: ") != std::string::npos);
      needed += error.empty() ? 0 : 1;
    }
    // In each step: one for the device, seven for gradients, five for a buffer of gradients that is used
    // again, seven for parameters, and one of the compute queue; for memory that uploads read, five in fp32,
    // and with a copy in bf16, which is written later, the last one alone.
    CHECK(needed == (model == DType::f32 ? 52 : 44));
  }
}

TEST_CASE("chunks are read and written in any order, with several arrays and odd sizes") {
  const test::TemporaryDirectory directory;
  for (const bool checked : {false, true}) {
    const auto device = checked ? test::Checked::make(1) : test::Cpu::make(1);
    HostDevice host(*device, kernels::cpu_table());
    for (const size_t chunks : {1, 2, 3, 4, 11, 12}) {
      CAPTURE(chunks);
      std::vector<int64_t> counts, others;
      for (size_t i = 0; i < chunks; ++i) {
        counts.push_back(1 + static_cast<int64_t>(i * 1777 % 2500));
        others.push_back(1 + static_cast<int64_t>(i % 3));
      }
      const bool direct = chunks != 11;
      StateFile file(host, directory.path(), "rank 0", chunks, direct);
      const StateFile::Array arrays[] = {file.add(DType::f32, counts), file.add(DType::f32, others)};
      std::vector<std::vector<float>> expected[2];
      for (size_t a = 0; a < 2; ++a)
        for (const int64_t n : a == 0 ? counts : others)
          expected[a].emplace_back(static_cast<size_t>(n), 0.f);
      std::mt19937 random(static_cast<unsigned>(chunks));
      for (int i = 0; i < 200; ++i) {
        const size_t chunk = random() % chunks, a = random() % 2;
        if (random() % 4 == 0) file.start_read(random() % chunks);
        file.load(chunk, arrays[a].index);
        const Tensor& tensor = arrays[a].chunks[chunk];
        REQUIRE(tensor.to_floats() == expected[a][chunk]);
        if (random() % 2 == 0) continue;
        expected[a][chunk] = sine(tensor.elements(), i);
        tensor.copy_from_host_bytes(std::as_bytes(std::span(expected[a][chunk])));
        file.set_changed(chunk, arrays[a].index);
        if (random() % 2 == 0) file.start_write(chunk);
      }
      if (!direct) CHECK_FALSE(file.is_direct());
    }
  }
}

TEST_CASE("the file has no name, all of its space, and three chunks in memory") {
  const test::TemporaryDirectory directory;
  const auto device = test::Checked::make(1);
  const MemoryUse before = device->memory(MemoryKind::host);
  {
    HostDevice host(*device, kernels::cpu_table());
    constexpr int64_t kElements = 5000, kRounded = 5 * StateFile::kAlignment;
    StateFile file(host, directory.path(), "rank 0", 10);
    const auto array = file.add(DType::f32, std::vector<int64_t>(10, kElements));
    CHECK(file.bytes() == 10 * kRounded);
    CHECK(device->memory(MemoryKind::host).now - before.now == 3 * (kRounded + StateFile::kAlignment));
    CHECK(fs::is_empty(directory.path()));
    CHECK(unnamed_file_in(directory.path()).empty());
    file.open();
    CHECK(fs::is_empty(directory.path()));
    const fs::path link = unnamed_file_in(directory.path());
    REQUIRE(!link.empty());
    struct stat status {};
    REQUIRE(::stat(link.c_str(), &status) == 0);
    CHECK(status.st_size == file.bytes());
    CHECK(int64_t{status.st_blocks} * 512 >= file.bytes());
  }
  CHECK(unnamed_file_in(directory.path()).empty());
}

TEST_CASE("estimates count the memory and the bytes of a file that does not exist") {
  const auto meta = make_meta_device(kernels::cpu_table(), 1, {}, false);
  HostDevice host(*meta, kernels::cpu_table());
  StateFile file(host, "/there/is/no/such/directory", "rank 0", 10);
  file.add(DType::f32, std::vector<int64_t>(10, 5000));
  file.open();
  file.load(4);
  file.set_changed(4);
  file.start_write(4);
  CHECK(file.bytes() == 10 * 5 * StateFile::kAlignment);
  CHECK(meta->memory(MemoryKind::host).now == 3 * 6 * StateFile::kAlignment);
}

TEST_CASE("a directory without the file's space, or none at all, is an error before the first step") {
  const auto device = test::Checked::make(1);
  HostDevice host(*device, kernels::cpu_table());
  const auto opened = [&](const fs::path& path, size_t chunks) {
    return test::error_of([&] {
      StateFile file(host, path, "rank 3", chunks);
      file.add(DType::f32, std::vector<int64_t>(chunks, int64_t{1} << 20));
      file.open();
    });
  };
  const test::TemporaryDirectory directory;
  CHECK(opened(directory.path(), 2).empty());
  const fs::path missing = directory.path() / "missing";
  CHECK(opened(missing, 2)
            .find("io: optimizer.optimizer_offload_path `" + missing.string() +
                  "`: cannot create a file for the optimizer state (rank 3): No such file") == 0);
  CHECK(opened("/proc/self", 2).find("cannot create a file for the optimizer state (rank 3)") !=
        std::string::npos);
  // 4 MiB times a million.
  const std::string full = opened(directory.path(), 1'000'000);
  CAPTURE(full);
  CHECK(full.find("no space for the optimizer state of rank 3: 3.81 TiB needed, ") != std::string::npos);
  CHECK(full.find(" free\n  help: choose a directory with more space") != std::string::npos);
}

TEST_CASE("a file that another program truncates is an error where its state is needed") {
  for (const bool checked : {false, true}) {
    const test::TemporaryDirectory directory;
    const auto device = checked ? test::Checked::make(1) : test::Cpu::make(1);
    const std::string error = test::error_of([&] {
      Chunks chunks(*device, directory.path(), test::kAdam, DType::bf16);
      chunks.step(0, false);
      // Until all chunks are written and read.
      (void)chunks.values();
      const fs::path file = unnamed_file_in(directory.path());
      REQUIRE(!file.empty());
      REQUIRE(::truncate(file.c_str(), 3 * StateFile::kAlignment) == 0);
      chunks.step(1, false);
      device->synchronize();
    });
    CHECK_MESSAGE(error.find("the file of the optimizer state (rank 3) ends at byte ") != std::string::npos,
                  error);
  }
}

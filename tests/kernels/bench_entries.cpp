// Every kernel has an entry in kernels/bench.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "base/error.hpp"
#include "kernels/bench/bench.hpp"
#include "kernels/each_family.hpp"

using namespace capstan;

namespace {

// Notes the kernels that are launched on it, and runs none.
class LaunchListDevice final : public Device {
 public:
  LaunchListDevice() {
    table_ = &kernels::cpu_table();
    launch_mode_ = LaunchMode::none;
  }
  DeviceType type() const override { return DeviceType::meta; }
  LaunchMode launch_mode(const void* kernel) const override {
    launched.insert(kernel);
    if (kernel == failing) fail(ErrorCode::failed, "a planned error");
    return LaunchMode::none;
  }
  void synchronize() override {}
  std::byte* host_address(std::byte*) override { return nullptr; }
  void zero(std::byte*, int64_t) override {}
  void copy(std::byte*, const std::byte*, int64_t) override {}
  void copy_to_device(std::byte*, const void*, int64_t) override {}
  void copy_to_host(void*, const std::byte*, int64_t) override {}

  mutable std::unordered_set<const void*> launched;
  const void* failing = nullptr;

 protected:
  int workers() const override { return 1; }
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool, int64_t, int64_t) override {}
  // Never dereferenced.
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return reinterpret_cast<std::byte*>((pool == Pool::large ? uintptr_t{1} << 60 : uintptr_t{1} << 20) +
                                        static_cast<uintptr_t>(offset));
  }
};

template <class Function>
constexpr bool kIsKernel = false;
template <class... P>
constexpr bool kIsKernel<void (*)(kernels::Context&, P...)> = true;

// Initializes a function of a family, to learn its type.
struct FunctionType {
  bool& is_kernel;
  template <class Function>
  operator Function() const {  // NOLINT: an implicit conversion on purpose
    is_kernel = kIsKernel<Function>;
    return nullptr;
  }
};
// Which functions of a family are kernels: the others give the sizes of workspaces, for example.
template <class Family>
auto find_kernels() {
  std::array<bool, sizeof(Family) / sizeof(void*)> are_kernels{};
  [&]<size_t... I>(std::index_sequence<I...>) {
    const Family family{FunctionType{are_kernels[I]}...};
    static_cast<void>(family);
  }
  (std::make_index_sequence<are_kernels.size()>());
  return are_kernels;
}

}  // namespace

TEST_CASE("a kernel that fails is a row with its error, and the others are measured") {
  LaunchListDevice device;
  device.failing = reinterpret_cast<const void*>(device.table().norm->forward);
  std::vector<std::string> failed, measured;
  kernels::KernelBenchOptions options{
      .seconds = 0, .wanted = [](std::string_view name) { return name.starts_with("quickstart norm"); }};
  CHECK_THROWS(kernels::measure_kernels(device, options));
  options.report = [&](const kernels::KernelRate& row) {
    (row.error.empty() ? measured : failed).push_back(row.name + row.error);
  };
  kernels::measure_kernels(device, options);
  REQUIRE(!failed.empty());
  CHECK(failed[0] == "quickstart norm forwarda planned error");
  CHECK(std::ranges::find(measured, "quickstart norm backward, accumulated") != measured.end());
}

TEST_CASE("every kernel is measured by `capstan bench`") {
  LaunchListDevice device;
  kernels::measure_kernels(device, {.seconds = 0});
  const kernels::Table& table = device.table();
  // Of a few values: they take as long as any launch.
  const auto address = [](auto kernel) { return reinterpret_cast<const void*>(kernel); };
  const std::unordered_set<const void*> short_kernels{
      address(table.router->update_bias),      address(table.cross_entropy->loss),
      address(table.decoding->positions),      address(table.decoding->advance),
      address(table.quantize->current_scale),  address(table.quantize->delayed_scale),
      address(table.step_control->sum_losses), address(table.step_control->sum_ranks),
      address(table.step_control->control)};
  size_t found = 0;
  kernels::for_each_family([&](const char* name, auto family) {
    const auto are_kernels = find_kernels<std::remove_cvref_t<decltype(*(table.*family))>>();
    std::array<const void*, are_kernels.size()> functions;
    std::memcpy(functions.data(), table.*family, sizeof functions);
    for (size_t i = 0; i < functions.size(); ++i) {
      if (!are_kernels[i] || !functions[i] || short_kernels.contains(functions[i])) continue;
      INFO("function ", i + 1, " of kernels/", name, ".hpp has no entry in kernels/bench");
      CHECK(device.launched.contains(functions[i]));
      ++found;
    }
  });
  CHECK(found > 60);
}

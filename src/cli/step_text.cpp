#include "cli/step_text.hpp"

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/table.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::cli {

namespace {

std::string bytes_text(int64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

std::string sent_text(const train::StepEstimate& estimate) {
  int64_t total = 0;
  std::string by_group;
  for (const auto& [group, bytes] : estimate.sent) {
    total += bytes;
    if (bytes > 0) by_group += (by_group.empty() ? "" : ", ") + group + " " + bytes_text(bytes);
  }
  return total == 0 ? "nothing" : bytes_text(total) + " (" + by_group + ")";
}

// Kernels, workspace and the allocator are those of one device.
std::string device_text(const config::Config& config) {
  const config::DeviceKind kind = train::device_kind(config.train.device);
  return "device: " + std::string(config::enum_name(kind)) +
         (kind == config::DeviceKind::cpu ? "; train.device=cuda shows the step of a GPU" : "") + "\n";
}

}  // namespace

std::string step_text(const config::Config& config, std::optional<int64_t> rank,
                      const train::ResidentData& data) {
  train::refuse_missing_estimates(config);
  const int64_t world = config.dist.world_size;
  if (rank && *rank >= world)
    fail(ErrorCode::usage,
         "--rank " + std::to_string(*rank) + " is not one of " + std::to_string(world) + " ranks",
         "ranks are counted from 0");
  const comm::Mesh mesh(train::mesh_sizes(config, world), 0);
  const std::vector<int64_t> ranks = rank ? std::vector{*rank} : train::pipeline_ranks(config);

  Table table;
  std::vector<std::string> heads{"rank", "stage"};
  for (size_t category = 0; category < kMemoryCategories; ++category)
    heads.emplace_back(name_of(static_cast<MemoryCategory>(category)));
  heads.insert(heads.end(), {"cached", "total", "host memory", "optimizer state in a file"});
  for (size_t queue = 0; queue < kQueues; ++queue)
    heads.push_back(std::string(name_of(static_cast<Queue>(queue))) + " launches");
  heads.insert(heads.end(), {"copied to device", "copied to host", "sent in a step"});
  std::vector<std::vector<std::string>> rows{heads};
  int64_t most = -1;
  std::string largest;
  for (const int64_t r : ranks) {
    const train::StepEstimate estimate =
        train::estimate_step(config, r, train::ranks_on_one_host(config), data.bytes);
    std::vector<std::string> row{std::to_string(r), std::to_string(mesh.dense().index(r, comm::Axis::pp))};
    const auto unless_zero = [](int64_t count, const std::string& text) { return count > 0 ? text : ""; };
    const auto bytes_unless_zero = [&](int64_t bytes) { return unless_zero(bytes, bytes_text(bytes)); };
    for (const int64_t bytes : estimate.memory.peak_by_category) row.push_back(bytes_unless_zero(bytes));
    row.push_back(bytes_unless_zero(estimate.memory.cached()));
    row.push_back(bytes_text(estimate.memory.total()));
    row.push_back(bytes_unless_zero(estimate.host_memory.total()));
    row.push_back(bytes_unless_zero(estimate.state_file));
    for (const int64_t count : estimate.launches_by_queue)
      row.push_back(unless_zero(count, with_separators(count)));
    for (const int64_t bytes : {estimate.copied_to_device, estimate.copied_to_host})
      row.push_back(bytes_unless_zero(bytes));
    row.push_back(sent_text(estimate));
    rows.push_back(row);
    if (estimate.memory.total() <= most) continue;
    most = estimate.memory.total();
    largest =
        "largest: rank " + std::to_string(r) + ": " + bytes_text(most) + ", sends " + sent_text(estimate);
  }
  // Drops columns that are empty for all ranks, such as categories without memory.
  for (size_t column = heads.size(); column-- > 0;) {
    bool empty = true;
    for (size_t i = 1; i < rows.size(); ++i) empty &= rows[i][column].empty();
    if (!empty) continue;
    for (auto& row : rows) row.erase(row.begin() + static_cast<std::ptrdiff_t>(column));
  }
  for (auto& row : rows) table.add(std::move(row));
  return table.text() + device_text(config) + largest + "\n" +
         (data.left_out.empty() ? "" : "without " + data.left_out + "\n");
}

}  // namespace capstan::cli

// A small schema with every kind of field, a library of its own, and a directory for recipes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/core/field.hpp"
#include "config/core/library.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan::config::testing {

enum class Norm { layer, rms };
enum class Kind { gpt, mock };
enum class Scheme { lora, dora };
enum class DType { fp32, bf16 };

struct Source {
  std::string name;
  double weight = 1;
  int64_t epochs = 1;
};

struct ModelSection {
  int64_t hidden_size = 64;
  std::optional<int64_t> ffn_hidden_size;
  int64_t num_heads = 4;
  int64_t seq_length = 128;
  double dropout = 0;
  Norm norm = Norm::layer;
  DType dtype = DType::fp32;
  std::optional<int64_t> experts;
  int64_t topk = 2;
  int64_t capacity_log = 0;
  int64_t mask = 0;
};
struct TrainSection {
  int64_t iters = 100;
  int64_t global_batch = 8;
  int64_t micro_batch = 1;
  std::optional<std::string> note;
  std::string title = "none yet";
  std::vector<int64_t> skip;
  std::vector<std::string> tags = {"a"};
  bool verbose = false;
  Duration timeout{600};
  Duration minutes{60};
  Bytes buffer{1 << 20};
  Path save;
  std::optional<Path> load;
  double limit = 1;
  std::vector<std::pair<std::string, std::string>> env;
  std::optional<std::vector<std::string>> modules;
};
struct OptSection {
  double lr = 1e-3;
  std::optional<double> min_lr;
  double beta = 0.9;
  double warmup = 0;
  double scale = 1;
  Secret token;
};
struct DataSection {
  Kind kind = Kind::gpt;
  std::optional<std::string> path;
  int64_t seed = 1;
  std::vector<std::pair<std::string, double>> blend;
  std::vector<Source> sources;
};
struct PeftSection {
  Scheme scheme = Scheme::lora;
  int64_t dim = 8;
  std::vector<std::string> targets = {"linear_qkv"};
};
struct DistSection {
  int64_t world_size = 1;
  int64_t tensor_parallel_size = 1;
  std::optional<int64_t> data_parallel_size;
};
struct Root {
  std::string name, description;
  ModelSection model;
  TrainSection train;
  OptSection optimizer;
  DataSection dataset;
  std::optional<PeftSection> peft;
  DistSection dist;
};

void describe(Section<Source>& s);
void describe(Section<ModelSection>& s);
void describe(Section<TrainSection>& s);
void describe(Section<OptSection>& s);
void describe(Section<DataSection>& s);
void describe(Section<PeftSection>& s);
void describe(Section<DistSection>& s);

const Schema& test_schema();
const Library& test_library();

struct Outcome : Resolved {
  Root config;
  // Codes of the errors, sorted by location: "C0102 C0201".
  std::string codes() const;
  // Every diagnostic in one line each.
  std::string all() const;
  const Diagnostic* first(std::string_view code) const;
  // Whether the diagnostics in human-readable form contain the text.
  bool says(std::string_view text) const;
  Value value(const std::string& path) const;
  // The value as YAML.
  std::string text(const std::string& path) const;
};

// A directory of its own, removed at the end.
class Workspace {
 public:
  Workspace();
  ~Workspace();
  // Returns the path.
  std::string write(const std::string& name, std::string_view content) const;
  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  Outcome resolve(const std::string& recipe, const std::vector<std::string>& overrides = {},
                  std::optional<int64_t> ranks = {}) const;
  Outcome resolve(const Request& request) const;
  // The text as a recipe file, r.yaml.
  Outcome text(std::string_view content, const std::vector<std::string>& overrides = {}) const;

 private:
  std::filesystem::path directory_;
};

// The text as the only override of an empty recipe.
Outcome with_override(const std::string& override);

}  // namespace capstan::config::testing

namespace capstan::config {
template <>
struct EnumNames<testing::Norm> {
  static constexpr EnumEntry<testing::Norm> list[] = {
      {testing::Norm::layer, "LayerNorm", "mean and variance"},
      {testing::Norm::rms, "RMSNorm", "root mean square", "rms rmsnorm"}};
};
template <>
struct EnumNames<testing::Kind> {
  static constexpr EnumEntry<testing::Kind> list[] = {{testing::Kind::gpt, "gpt"},
                                                      {testing::Kind::mock, "mock"}};
};
template <>
struct EnumNames<testing::Scheme> {
  static constexpr EnumEntry<testing::Scheme> list[] = {{testing::Scheme::lora, "lora"},
                                                        {testing::Scheme::dora, "dora"}};
};
template <>
struct EnumNames<testing::DType> {
  static constexpr EnumEntry<testing::DType> list[] = {
      {testing::DType::fp32, "fp32", "", "float32 torch.float32"},
      {testing::DType::bf16, "bf16", "", "bfloat16 torch.bfloat16"}};
};
}  // namespace capstan::config

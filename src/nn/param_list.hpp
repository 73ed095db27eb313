// The parameters of a model, or of this rank's stages of it, in the order of their declaration. The
// constructor of a layer adds its parameters, and reads from the list over which ranks they are sharded.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "nn/parallel.hpp"
#include "ops/parameter.hpp"

namespace capstan::nn {

struct AdapterOptions;

class ParamList {
 public:
  ParamList() = default;
  explicit ParamList(const Parallel& parallel, const AdapterOptions* adapters = nullptr)
      : parallel_(parallel), adapters_(adapters) {}
  const Parallel& parallel() const { return parallel_; }
  // Null: none.
  const AdapterOptions* adapters() const { return adapters_; }
  const Parameter& add(ParamSpec spec) {
    CAPSTAN_ASSERT(names_.insert(spec.name).second, "two parameters named `" + spec.name + "`");
    parameters_.push_back(std::make_unique<Parameter>(std::move(spec), static_cast<int>(parameters_.size()),
                                                      parallel_.shard_ranks()));
    return *parameters_.back();
  }
  std::vector<std::unique_ptr<Parameter>> take() { return std::move(parameters_); }

 private:
  Parallel parallel_;
  const AdapterOptions* adapters_ = nullptr;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::unordered_set<std::string> names_;
};

// The position of a layer in the model: the prefix of its parameters' names, its index and its block.
struct ModulePath {
  // "decoder.layers.3.mlp", without the last dot.
  std::string prefix;
  // Global layer index, -1: outside the layers.
  int layer = -1;
  // Unit of prefetch: "layer 3".
  std::string block;
  ModulePath inside(const std::string& name) const { return {prefix + "." + name, layer, block}; }
  ParamSpec spec(const std::string& name, Shape shape, Init init) const {
    ParamSpec result;
    result.name = prefix + "." + name;
    result.shape = shape;
    result.init = init;
    result.layer = layer;
    result.block = block;
    result.no_weight_decay = shape.rank() < 2;
    return result;
  }
};

}  // namespace capstan::nn

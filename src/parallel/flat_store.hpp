// Parameters, gradients and main copies in flat buckets, replicated over the data-parallel group.
//
// A bucket holds whole parameters, in the order in which their gradients become ready (last layer first), each aligned to
// 64 elements, and is padded to a multiple of 64 x group size, so that it can be cut evenly over the ranks. In fp32 the main
// parameters are what the model computes with: there is no second copy. Gradients are fp32 sums over micro-batches, and
// after reduce_gradients() over ranks; dividing by the token count is the optimizer's business.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "ops/parameter.hpp"
#include "optim/optimizer.hpp"

namespace capstan::parallel {

class FlatStore final : public ParamStore {
 public:
  struct Options {
    DType compute = DType::f32;
    int64_t bucket_elements = 40'000'000;
    bool decay_qk_norm = false;  // keep weight decay on query and key norms
    bool gradients = true;       // false: evaluation and generation
  };
  // Where a parameter lies. Local shapes are the global ones here; sharded stores differ.
  struct Placement {
    const Parameter* parameter;
    size_t bucket;
    int64_t begin;  // elements from the start of the bucket
  };

  FlatStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters,
            comm::Communicator& data_parallel, const Options& options);

  // ParamStore
  Tensor acquire(const Parameter& parameter) override;
  void release(const Parameter&) override {}
  bool trains(const Parameter&) const override { return options_.gradients; }
  Tensor gradient(const Parameter& parameter) override;

  void zero_gradients();
  void reduce_gradients();  // sums over the data-parallel group
  void refresh_model();     // model copies from main parameters (no-op in fp32)

  const std::vector<Placement>& placements() const { return placements_; }  // in the model's order
  Tensor main(const Parameter& parameter)
      const;  // fp32, the parameter's shape; undefined where only the model copy exists
  // A view of one parameter's part of a flat tensor that was made in a bucket's shape (optimizer state).
  Tensor part(const Parameter& parameter, const std::vector<Tensor>& buckets) const;
  std::vector<optim::FlatBuffer> flat_buffers() const;
  int64_t elements() const { return elements_; }  // parameters, without padding

 private:
  struct Bucket {
    int64_t elements = 0;  // padded
    Tensor main, model, gradients;
    std::vector<const Parameter*> parameters;
  };
  const Placement& placement(const Parameter& parameter) const {
    return placements_[static_cast<size_t>(parameter.index())];
  }
  Tensor view(const Tensor& flat, const Parameter& parameter) const;

  Device& device_;
  comm::Communicator& data_parallel_;
  Options options_;
  std::vector<Bucket> buckets_;
  std::vector<Placement> placements_;
  int64_t elements_ = 0;
};

}  // namespace capstan::parallel

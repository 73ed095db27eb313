// A checkpoint made ready for evaluation and generation: its recipe's model, its tokenizer, its weights. No
// optimizer, no gradients. Tensor and pipeline ranks each hold their part of the weights and of the KV cache,
// expert ranks their experts; every rank makes the same calls and gets the same results.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/mesh.hpp"
#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "data/loader.hpp"
#include "models/model.hpp"
#include "parallel/flat_store.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::train {

class LoadedModel {
 public:
  // checkpoint and config: the results of stored_recipe() for the ranks of `world`, which outlives the model.
  // The tokenizer is the checkpoint's own copy if it has one. Each rank reads its part of the weights.
  // adapter: the name (see open_adapters()) of adapters to add to the checkpoint; empty: none. Collective;
  // ErrorCode::rank_failure if the arguments differ between ranks.
  LoadedModel(const std::filesystem::path& checkpoint, const config::Config& config, comm::World& world,
              const std::string& adapter = {});

  const config::Config& config() const { return config_; }
  // Null if the model has no tokenizer.
  const std::shared_ptr<const text::Tokenizer>& tokenizer() const { return tokenizer_; }
  // Throws ErrorCode::unsupported, with the reason, if the model has no tokenizer.
  const text::Tokenizer& require_tokenizer() const;
  Device& device() const { return *device_; }
  // eos_token_id of the model's generation_config.json or, if that is missing, of its config.json.
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }

  // Makes a cache for one sequence of up to `capacity` tokens. Throws ErrorCode::usage if the model has fewer
  // positions.
  models::KvCache make_cache(int64_t capacity) const { return model_->make_cache(*device_, 1, capacity); }
  // Appends tokens to those in the cache, and returns the logits [vocab] of the next token. Collective.
  std::vector<float> next_logits(std::span<const int32_t> tokens, models::KvCache& cache);
  // Token ids on the device, for next_token().
  Tensor upload_ids(std::span<const int32_t> ids) const;
  // Appends tokens, i32 [n] on the device, to those in the cache, and draws the next token among the ids that
  // the tokenizer has: i32 [1] on the device, -1 if logits are not finite. Collective.
  Tensor next_token(const Tensor& tokens, models::KvCache& cache, const kernels::SamplingOptions& options);
  // -log p(label) of every token [rows * sequence_length], in natural logarithm. Collective.
  std::vector<float> token_losses(const data::MicroBatch& batch);
  // fp32 [rows * sequence_length, vocab]: the logits of the token after each position. On one rank only.
  std::vector<float> all_logits(const data::MicroBatch& batch);

 private:
  // The output of a stage of this rank for hidden states [rows, hidden]: hidden states, or at the last stage
  // the result.
  using Stage = FunctionRef<Tensor(Tape& tape, size_t stage, const Tensor& hidden_states)>;
  // One pass through the stages of all ranks: the result of the last stage, undefined on other ranks.
  Tensor pass(int64_t rows, Stage stage);
  // Copies `answer` from the ranks of the last stage to the host of every rank.
  template <class T>
  std::vector<T> on_every_rank(const Tensor& answer, int64_t values);
  // Runs tokens, i32 [1, n], through all stages and counts them in the cache. Returns the logits, as pass().
  Tensor decode(const Tensor& tokens, models::KvCache& cache);

  config::Config config_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::vector<int32_t> end_tokens_;
  // Declared before the mesh, whose channels it outlives.
  std::unique_ptr<Device> device_;
  comm::Mesh mesh_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<parallel::FlatStore> store_;
  // Passes so far, of which the first do not use CUDA graphs.
  int64_t passes_ = 0;
  // Context of all passes, so that tables such as those of RoPE are uploaded once.
  std::unique_ptr<StepContext> context_;
};

}  // namespace capstan::train

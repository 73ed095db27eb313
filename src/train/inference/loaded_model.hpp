// A checkpoint made ready for evaluation and generation: its recipe's model, its tokenizer, its weights. No
// optimizer, no gradients. Tensor and pipeline ranks each hold their part of the weights and of the KV cache;
// every rank asks the same questions and gets the same answers.
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
  // checkpoint and config: what stored_recipe() gives for the ranks of `world`, which outlives the model. The
  // tokenizer is the checkpoint's own copy where there is one. Each rank reads its part of the weights.
  // Collective; ErrorCode::rank_failure where ranks are given different ones. adapter: what open_adapters()
  // takes, to stand beside the checkpoint's weights; empty: none but those of the checkpoint.
  LoadedModel(const std::filesystem::path& checkpoint, const config::Config& config, comm::World& world,
              const std::string& adapter = {});

  const config::Config& config() const { return config_; }
  // Null if the model has no tokenizer.
  const std::shared_ptr<const text::Tokenizer>& tokenizer() const { return tokenizer_; }
  // Throws ErrorCode::unsupported, with the reason, if the model has no tokenizer.
  const text::Tokenizer& require_tokenizer() const;
  Device& device() const { return *device_; }
  // eos_token_id of the model's generation_config.json, or of its config.json where that is missing.
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }

  // Makes a cache for one sequence of up to `capacity` tokens. Throws ErrorCode::usage if the model has fewer
  // positions.
  models::KvCache make_cache(int64_t capacity) const { return model_->make_cache(*device_, 1, capacity); }
  // Feeds tokens after those in the cache: the logits [vocab] of the token after the last of them.
  // Collective.
  std::vector<float> next_logits(std::span<const int32_t> tokens, models::KvCache& cache);
  // Token ids on the device, for next_token().
  Tensor upload_ids(std::span<const int32_t> ids) const;
  // Feeds tokens, i32 [n] on the device, after those in the cache, and draws the token after the last of
  // them, among the ids that the tokenizer can produce: i32 [1] on the device, -1 where logits are not
  // finite. Collective.
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
  // `answer`, which the ranks of the last stage have, on every rank's host.
  template <class T>
  std::vector<T> on_every_rank(const Tensor& answer, int64_t values);
  // Feeds tokens, i32 [1, n], to all stages and counts them in the cache: logits as pass() gives them.
  Tensor decode(const Tensor& tokens, models::KvCache& cache);

  config::Config config_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::vector<int32_t> end_tokens_;
  // Outlives the channels of the mesh.
  std::unique_ptr<Device> device_;
  comm::Mesh mesh_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<parallel::FlatStore> store_;
};

}  // namespace capstan::train

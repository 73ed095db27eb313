// A decoder-only transformer: what all architectures share. Its layers are made by the architecture.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "config/sections/model.hpp"
#include "models/architectures/architecture.hpp"
#include "models/model.hpp"
#include "nn/embedding.hpp"
#include "nn/mtp_layer.hpp"
#include "nn/rope_table.hpp"

namespace capstan::models {

class DecoderModel final : public Model {
 public:
  using Batch = models::Batch;
  using Loss = models::Loss;
  using ForwardOptions = models::ForwardOptions;
  using KvCache = models::KvCache;

  DecoderModel(const Architecture& architecture, const config::ModelConfig& config, const ModelShard& shard);

  const std::vector<std::unique_ptr<Parameter>>& parameters() const override { return parameters_; }
  const std::vector<Stage>& stages() const override { return stages_; }
  int64_t hidden() const override { return hidden_; }
  StageResult forward_stage(Tape& tape, size_t stage, const Batch& batch, const Var& hidden_states,
                            const ForwardOptions& options) const override;
  KvCache make_cache(Device& device, int64_t batch, int64_t capacity) const override;
  Tensor decode_stage(Tape& tape, size_t stage, const Tensor& tokens, const Tensor& hidden_states,
                      KvCache& cache) const override;
  Tensor all_logits(Tape& tape, const Batch& batch) const override;

 private:
  bool any_stage(bool Stage::*has) const;
  // Depths of multi-token prediction on this rank.
  int64_t mtp_layers() const;
  void add_embedding(nn::ParamList& list, const config::ModelConfig& config);
  void add_output(nn::ParamList& list, const config::ModelConfig& config);
  void add_mtp_layers(nn::ParamList& list, const Architecture& architecture,
                      const config::ModelConfig& config);
  nn::TokenContext token_context(Tape& tape, const Batch& batch, const ForwardOptions& options) const;
  // Runs the layers of a stage. The model section selects which activations are recomputed.
  nn::HiddenStates forward_layers(Tape& tape, const Stage& stage, nn::HiddenStates hidden_states,
                                  const nn::TokenContext& context, bool recompute) const;
  // hidden_states: the output of the final norm, of this rank's rows.
  Loss head_loss(Tape& tape, const Var& hidden_states, const Tensor& labels, const Tensor& loss_mask,
                 const std::string& output) const;
  // Multi-token prediction: appends the hidden states of each depth to those of the model, `states`.
  void predict_later_tokens(Tape& tape, std::vector<Var>& states, const Batch& batch,
                            const nn::TokenContext& context, bool recompute) const;
  // The losses of the model and of each depth, from their hidden states.
  Loss losses(Tape& tape, std::span<const Var> states, const Batch& batch) const;
  const nn::DecoderLayer& layer(int64_t index) const { return *layers_.at(index); }
  const Parameter& head() const { return output_ ? *output_ : embedding_->words(); }
  void check_positions(int64_t positions) const;
  // The sum of the micro-batch's loss weights, fp32 [1].
  Tensor loss_weight_sum(Tape& tape, const Batch& batch) const;

  int64_t vocab_ = 0, hidden_ = 0;
  // Rows of the position table, 0: none.
  int64_t learned_positions_ = 0;
  // Soft cap of the output layer's logits; 0: none.
  float final_softcap_ = 0;
  // Full recomputation: the first recomputed_layers_ layers of each stage in regions of region_layers_.
  int64_t recomputed_layers_ = 0, region_layers_ = 1;
  bool recomputes_mtp_ = false;
  // The first layers of each stage whose saved activations are offloaded.
  int64_t offloaded_layers_ = 0;

  std::vector<Stage> stages_;
  nn::Parallel parallel_;
  // Referenced by the layers.
  std::shared_ptr<const nn::AdapterOptions> adapters_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  // Null: on another rank. Those with multi-token prediction have a copy.
  std::unique_ptr<nn::Embedding> embedding_;
  // The layers of this stage, by global index.
  std::map<int64_t, std::unique_ptr<nn::DecoderLayer>> layers_;
  // Null: on another rank.
  std::unique_ptr<nn::Norm> final_norm_;
  // By depth; empty: none on this rank.
  std::vector<std::unique_ptr<nn::MtpLayer>> mtp_layers_;
  // Null: tied to the embedding, or on another rank.
  const Parameter* output_ = nullptr;
  // Null without rotary positions.
  std::unique_ptr<nn::RopeTables> rope_tables_;
  // Some layer of this rank adds losses to the gradients, those of its router.
  bool has_losses_of_layers_ = false;
};

}  // namespace capstan::models

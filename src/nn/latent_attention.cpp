#include "nn/latent_attention.hpp"

namespace capstan::nn {

namespace {

Linear::Options replicated(int64_t in, int64_t out, const Init& init) {
  return {.in = in, .out = out, .init = init, .sharding = LinearSharding::none};
}
Linear::Options over_heads(int64_t in, int64_t out, const Init& init) {
  return {.in = in, .out = out, .init = init, .sharding = LinearSharding::column};
}
int64_t rope_dim(const Attention::Options& o) {
  CAPSTAN_ASSERT(o.rope.has_value(), "latent attention needs Options::rope");
  return o.rope->rotary_dim;
}

}  // namespace

LatentAttention::LatentAttention(ParamList& parameters, const ModulePath& path, const Options& o,
                                 const Sizes& sizes)
    : Attention(parameters, path, o),
      sizes_(sizes),
      heads_{o.heads / parallel_.size(), sizes.nope_dim, rope_dim(o), sizes.value_dim},
      q_down_(sizes.q_rank
                  ? std::optional<Linear>(std::in_place, parameters, path.inside("linear_q_down_proj"),
                                          replicated(o.hidden, *sizes.q_rank, o.init))
                  : std::nullopt),
      q_norm_(sizes.q_rank ? optional_norm(parameters, path.inside("q_layernorm"), *sizes.q_rank, o.qk_norm)
                           : std::nullopt),
      q_up_(parameters, path.inside(sizes.q_rank ? "linear_q_up_proj" : "linear_q_proj"),
            over_heads(sizes.q_rank.value_or(o.hidden), o.heads * heads_.qk_dim(), o.init)),
      kv_down_(parameters, path.inside("linear_kv_down_proj"),
               replicated(o.hidden, sizes.kv_rank + heads_.rope_dim, o.init)),
      kv_norm_(optional_norm(parameters, path.inside("kv_layernorm"), sizes.kv_rank, o.qk_norm)),
      kv_up_(parameters, path.inside("linear_kv_up_proj"),
             over_heads(sizes.kv_rank, o.heads * (sizes.nope_dim + sizes.value_dim), o.init)),
      output_(parameters, path.inside("linear_proj"),
              {.in = o.heads * sizes.value_dim,
               .out = o.hidden,
               .bias = o.output_bias,
               .init = o.output_init,
               .sharding = LinearSharding::row}) {}

Var LatentAttention::normalized(Tape& tape, const std::optional<Norm>& norm, Var x,
                                const Linear& reader) const {
  if (!norm) return x;
  // A recomputed region begins with its input in the compute type and quantizes it itself.
  return norm
      ->forward(tape, std::move(x), {}, sizes_.recompute_up_projections ? nullptr : reader.input_reader())
      .y;
}

LatentAttention::Compressed LatentAttention::compress(Tape& tape, const Var& x,
                                                      const TokenContext& context) const {
  Compressed result;
  result.q = x;
  if (q_down_) result.q = normalized(tape, q_norm_, q_down_->forward(tape, x, context), q_up_);
  auto [kv, k_rope] = ops::split_columns(tape, kv_down_.forward(tape, x, context), sizes_.kv_rank);
  result.kv = normalized(tape, kv_norm_, std::move(kv), kv_up_);
  // Each rank's heads contribute to the gradient.
  result.k_rope = ops::copy_to_tensor_parallel(tape, k_rope, parallel_, "rotary keys");
  return result;
}

Var LatentAttention::attend_compressed(Tape& tape, const Compressed& compressed, const TokenContext& context,
                                       const LayerCache& cache) const {
  const Var q = q_up_.forward(tape, compressed.q, context), kv = kv_up_.forward(tape, compressed.kv, context);
  Var qkv = ops::latent_qkv(tape, q, kv, compressed.k_rope, heads_, context.rope, context.positions);
  ops::AttentionOptions attention(heads_.layout());
  attention.shape.qk_dim = heads_.qk_dim();
  attention.shape.v_dim = heads_.value_dim;
  return attend(tape, std::move(qkv), attention, context, cache);
}

Var LatentAttention::forward(Tape& tape, const Var& x, const TokenContext& context,
                             const LayerCache& cache) const {
  Compressed compressed = compress(tape, x, context);
  Var out;
  if (sizes_.recompute_up_projections && !cache.keys_values)
    out = tape.recompute("mla_up_proj", {compressed.q, compressed.kv, compressed.k_rope},
                         [this, context](Tape& region, std::span<const Var> inputs) {
                           const Compressed saved{inputs[0], inputs[1], inputs[2]};
                           return std::vector<Var>{attend_compressed(region, saved, context, {})};
                         })[0];
  else
    out = attend_compressed(tape, compressed, context, cache);
  compressed = {};
  return output_.forward(tape, out, context, Linear::Bias::by_caller);
}

}  // namespace capstan::nn

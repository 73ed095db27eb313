#include "nn/attention.hpp"

#include <algorithm>

namespace capstan::nn {

Attention::Attention(ParamList& parameters, const ModulePath& path, const Options& options)
    : options_(options),
      parallel_(parameters.parallel().tensor),
      context_parallel_(parameters.parallel().context_of(path.layer)),
      layer_(static_cast<uint64_t>(path.layer)) {
  sink_.present = options.sink != Options::Sink::none;
  if (options.sink != Options::Sink::learned) return;
  ParamSpec logits = path.inside("core_attention").spec("softmax_offset", {options.heads}, options.init);
  logits.sharding = {ShardingAxis::tensor, 0};
  sink_.logits = &parameters.add(std::move(logits));
}

Var Attention::attend(Tape& tape, Var qkv, ops::AttentionOptions attention, const TokenContext& context,
                      const LayerCache& cache) const {
  attention.shape.batch = context.batch;
  attention.shape.seq = context.seq;
  attention.shape.scale = static_cast<float>(options_.scale);
  attention.shape.softcap = static_cast<float>(options_.softcap);
  attention.shape.window = options_.window;
  attention.sink = sink_;
  attention.shape.head_offset = parallel_.rank() * attention.layout.heads();
  if (cache.keys_values) {
    ops::LayerKvCache& keys_values = *cache.keys_values;
    if (!keys_values.k.defined())
      keys_values = ops::LayerKvCache::empty(tape.device(), attention.shape, cache.capacity, qkv.dtype());
    return ops::attention_decode(tape, std::move(qkv), attention, keys_values, cache.past);
  }
  const ops::Dropout dropout = context.attention_dropout(options_.dropout, layer_);
  attention.shape.dropout = dropout.p;
  attention.shape.dropout_key = dropout.key;
  attention.dropout_rows = dropout.dropout_rows;
  attention.documents = context.documents;
  return ops::context_attention(tape, std::move(qkv), attention, context_parallel_);
}

// Queries, keys and values of this rank's groups of heads.
static std::vector<OutputSlice> slices_of(const SelfAttention::Options& o, int ranks) {
  const int64_t groups = std::max<int64_t>(1, o.groups / ranks), d = o.head_dim;
  const int64_t queries = o.heads / ranks / groups * d;
  const Sharding shared{ShardingAxis::tensor, 0, 1, o.groups, d};
  return {{"linear_q", {groups, 0, queries}, o.heads * d, {ShardingAxis::tensor, 0}},
          {"linear_k", {groups, queries, d}, o.groups * d, shared},
          {"linear_v", {groups, queries + d, d}, o.groups * d, shared}};
}

SelfAttention::SelfAttention(ParamList& parameters, const ModulePath& path, const Options& options)
    : Attention(parameters, path, options),
      qkv_(parameters, path.inside("linear_qkv"),
           {.in = options.hidden,
            .out = (options.heads + 2 * options.groups) * options.head_dim,
            .bias = options.qkv_bias,
            .init = options.init,
            .sharding = LinearSharding::column,
            .groups = options.groups,
            .group_kv = 2 * options.head_dim,
            .slices = slices_of(options, parameters.parallel().tensor.size())}),
      output_(parameters, path.inside("linear_proj"),
              {.in = options.heads * options.head_dim,
               .out = options.hidden,
               .bias = options.output_bias,
               .init = options.output_init,
               .sharding = LinearSharding::row}) {
  if (!options.qk_norm) return;
  if (options.qk_norm_across_heads) {
    const int64_t d = options.head_dim;
    q_norm_.emplace(parameters, path.inside("q_layernorm"), options.heads * d, *options.qk_norm,
                    Sharding{ShardingAxis::tensor, 0});
    k_norm_.emplace(parameters, path.inside("k_layernorm"), options.groups * d, *options.qk_norm,
                    Sharding{ShardingAxis::tensor, 0, 1, options.groups, d});
    return;
  }
  q_norm_.emplace(parameters, path.inside("q_layernorm"), options.head_dim, *options.qk_norm,
                  Norm::Input::heads);
  k_norm_.emplace(parameters, path.inside("k_layernorm"), options.head_dim, *options.qk_norm,
                  Norm::Input::heads);
}

Var SelfAttention::forward(Tape& tape, const Var& x, const TokenContext& context,
                           const LayerCache& cache) const {
  Var qkv = qkv_.forward(tape, x, context);
  // This rank's heads: complete groups, or a share of one group where there are more ranks than groups.
  const int64_t heads = options_.heads / parallel_.size();
  const int64_t groups = std::max<int64_t>(1, options_.groups / parallel_.size());
  const auto layout = ops::qkv_layout(qkv.size(1), heads / groups, options_.head_dim);
  if (q_norm_ && options_.qk_norm_across_heads)
    qkv = ops::norm_across_heads(tape, qkv, layout, {options_.heads, options_.groups}, *q_norm_->gamma(),
                                 *k_norm_->gamma(), options_.qk_norm->options(), parallel_);
  ops::AttentionOptions attention(layout);
  ops::QueryKeyTransform& transform = attention.transform;
  if (q_norm_ && !options_.qk_norm_across_heads) {
    transform.norm = {q_norm_->gamma(), q_norm_->beta(), k_norm_->gamma(), k_norm_->beta()};
    transform.norm_options = options_.qk_norm->options();
  }
  if (options_.rope) {
    transform.table = context.rope;
    transform.positions = context.positions;
    transform.interleaved = options_.rope->interleaved;
  }
  const Var out = attend(tape, std::move(qkv), attention, context, cache);
  return output_.forward(tape, out, context, Linear::Bias::by_caller);
}

}  // namespace capstan::nn

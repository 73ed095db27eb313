// Shapes of the model, and how tensor and context parallelism divide them.
#include <cmath>

#include "config/sections/architecture.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/rotary.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(tensor_rules)

namespace {

int64_t tp(const Config& c) {
  return c.dist.tensor_model_parallel_size;
}

RULE("R0401", sequence_parallel_needs_tensor, "sequence parallelism needs tensor parallelism",
     "dist.sequence_parallel", "dist.tensor_model_parallel_size") {
  if (!c.dist.sequence_parallel || tp(c) > 1) return;
  report
      .error(
          "`dist.sequence_parallel` splits over the tensor-parallel ranks, but "
          "`dist.tensor_model_parallel_size` is 1")
      .help("set dist.sequence_parallel=false, or dist.tensor_model_parallel_size to 2 or more");
}

RULE("R0402", tensor_divides_heads, "num_attention_heads is divisible by the tensor-parallel size",
     "model.num_attention_heads", "dist.tensor_model_parallel_size") {
  if (c.model.num_attention_heads % tp(c) == 0) return;
  report
      .error("`model.num_attention_heads` " + to_text(c.model.num_attention_heads) +
             " is not divisible by the tensor-parallel size " + to_text(tp(c)))
      .help("nearest legal dist.tensor_model_parallel_size: " +
            nearest_divisors(tp(c), c.model.num_attention_heads));
}

RULE("R0403", tensor_divides_groups,
     "num_query_groups is divisible by the tensor-parallel size, or divides it (replicated key/value heads)",
     "model.num_query_groups", "dist.tensor_model_parallel_size") {
  if (!c.model.num_query_groups || c.model.multi_latent_attention) return;
  const int64_t groups = *c.model.num_query_groups;
  if (groups % tp(c) == 0 || tp(c) % groups == 0) return;
  report
      .error("`model.num_query_groups` " + to_text(groups) +
             " is neither a multiple nor a divisor of the tensor-parallel size " + to_text(tp(c)))
      .help("nearest legal dist.tensor_model_parallel_size: " + nearest_divisors(tp(c), groups) +
            ", or a multiple of " + to_text(groups));
}

RULE("R0404", groups_divide_heads, "num_attention_heads is divisible by num_query_groups",
     "model.num_query_groups", "model.num_attention_heads") {
  if (!c.model.num_query_groups || c.model.num_attention_heads % *c.model.num_query_groups == 0) return;
  report
      .error("`model.num_attention_heads` " + to_text(c.model.num_attention_heads) +
             " is not a multiple of `model.num_query_groups` " + to_text(*c.model.num_query_groups))
      .help("nearest legal num_query_groups: " +
            nearest_divisors(*c.model.num_query_groups, c.model.num_attention_heads));
}

RULE("R0405", heads_divide_hidden,
     "hidden_size is divisible by num_attention_heads, unless kv_channels is given", "model.hidden_size",
     "model.num_attention_heads", "model.kv_channels") {
  if (c.model.kv_channels || c.model.num_attention_heads < 1) return;
  report
      .error("`model.hidden_size` " + to_text(c.model.hidden_size) +
             " is not a multiple of `model.num_attention_heads` " + to_text(c.model.num_attention_heads) +
             ", and `model.kv_channels` is not given")
      .help(
          "nearest legal hidden_size: " +
          nearest_multiples(c.model.hidden_size, c.model.num_attention_heads) +
          "; or num_attention_heads: " + nearest_divisors(c.model.num_attention_heads, c.model.hidden_size));
}

RULE("R0406", tensor_divides_feed_forward, "ffn_hidden_size is divisible by the tensor-parallel size",
     "model.ffn_hidden_size", "dist.tensor_model_parallel_size", "model.num_moe_experts",
     "model.moe_layer_freq", "model.moe_first_dense_layers") {
  // R0703 has the width of experts.
  if (!c.model.ffn_hidden_size || *c.model.ffn_hidden_size % tp(c) == 0 || every_layer_has_experts(c.model))
    return;
  report
      .error("`model.ffn_hidden_size` " + to_text(*c.model.ffn_hidden_size) +
             " is not divisible by the tensor-parallel size " + to_text(tp(c)))
      .help("nearest legal ffn_hidden_size: " + nearest_multiples(*c.model.ffn_hidden_size, tp(c)));
}

RULE("R0407", tensor_divides_vocabulary,
     "the padded vocabulary size is divisible by the tensor-parallel size", "model.padded_vocab_size",
     "model.make_vocab_size_divisible_by", "dist.tensor_model_parallel_size") {
  if (!c.model.padded_vocab_size || *c.model.padded_vocab_size % tp(c) == 0) return;
  report
      .error("`model.padded_vocab_size` " + to_text(*c.model.padded_vocab_size) +
             " is not divisible by the tensor-parallel size " + to_text(tp(c)))
      .help("set model.make_vocab_size_divisible_by to a multiple of " + to_text(tp(c)));
}

RULE("R0408", padding_covers_vocabulary,
     "a given padded_vocab_size holds the vocabulary and is a multiple of make_vocab_size_divisible_by",
     "model.padded_vocab_size", "model.vocab_size", "model.make_vocab_size_divisible_by") {
  if (!c.model.padded_vocab_size) return;
  const int64_t rows = *c.model.padded_vocab_size, step = c.model.make_vocab_size_divisible_by;
  if (rows < c.model.vocab_size)
    report
        .error("`model.padded_vocab_size` " + to_text(rows) + " is less than `model.vocab_size` " +
               to_text(c.model.vocab_size))
        .help("leave model.padded_vocab_size unset; it follows from the vocabulary");
  else if (rows % step != 0)
    report
        .error("`model.padded_vocab_size` " + to_text(rows) +
               " is not a multiple of `model.make_vocab_size_divisible_by` " + to_text(step))
        .help("nearest legal padded_vocab_size: " + nearest_multiples(rows, step));
}

RULE("R0409", tensor_overlap_needs_sequence_parallel, "overlap of tensor parallelism needs sequence_parallel",
     "comm_overlap.tp_comm_overlap", "dist.sequence_parallel") {
  if (!c.comm_overlap.tp_comm_overlap || tp(c) == 1 || c.dist.sequence_parallel) return;
  report
      .error(
          "`comm_overlap.tp_comm_overlap` overlaps the collectives of sequence parallelism, but "
          "`dist.sequence_parallel` is false")
      .help("set dist.sequence_parallel=true, or comm_overlap.tp_comm_overlap=false");
}

RULE("R0410", rotated_width_even, "the rotated part of a head has an even width", "model.kv_channels",
     "model.rotary_percent") {
  const auto& m = c.model;
  if (m.position_embedding_type != PositionEmbedding::rope || m.multi_latent_attention || !m.kv_channels)
    return;
  const double width = m.rotary_percent * static_cast<double>(*m.kv_channels);
  const auto rotated = static_cast<int64_t>(std::llround(width));
  if (rotated >= 2 && rotated % 2 == 0 && std::abs(width - static_cast<double>(rotated)) < 1e-6) return;
  report
      .error("RoPE rotates pairs, but `model.rotary_percent` " + to_text(m.rotary_percent) +
             " of a head of width " + to_text(*m.kv_channels) + " is " + to_text(width) + " elements")
      .help("kv_channels * rotary_percent must be an even integer");
}

RULE("R0411", rope_scaling_ordered,
     "the low frequency factor is below the high one, beta_slow at most beta_fast",
     "model.rope_scaling_low_freq_factor", "model.rope_scaling_high_freq_factor",
     "model.rope_scaling_beta_slow", "model.rope_scaling_beta_fast") {
  const auto& m = c.model;
  if (m.position_embedding_type != PositionEmbedding::rope || !m.rope_scaling) return;
  if (m.rope_scaling_type == RopeScaling::yarn && m.rope_scaling_beta_slow > m.rope_scaling_beta_fast)
    report
        .error("`model.rope_scaling_beta_slow` " + to_text(m.rope_scaling_beta_slow) +
               " is above `model.rope_scaling_beta_fast` " + to_text(m.rope_scaling_beta_fast))
        .help("the paper has 1 and 32");
  if (m.rope_scaling_type != RopeScaling::llama3 ||
      m.rope_scaling_low_freq_factor < m.rope_scaling_high_freq_factor)
    return;
  report
      .error("`model.rope_scaling_low_freq_factor` " + to_text(m.rope_scaling_low_freq_factor) +
             " is not below `model.rope_scaling_high_freq_factor` " +
             to_text(m.rope_scaling_high_freq_factor))
      .help("Llama 3.1 has 1 and 4");
}

RULE("R0418", rope_factors_for_pairs,
     "longrope has a positive factor for each rotated pair, for short and for long sequences",
     "model.rope_scaling_short_factors", "model.rope_scaling_long_factors", "model.kv_channels",
     "model.rotary_percent") {
  const auto& m = c.model;
  if (m.position_embedding_type != PositionEmbedding::rope || !m.rope_scaling ||
      m.rope_scaling_type != RopeScaling::longrope || !m.kv_channels)
    return;
  const int64_t pairs = rotary_width(m) / 2;
  const auto check = [&](const char* field, const std::vector<double>& factors) {
    const auto given = static_cast<int64_t>(factors.size());
    if (given != pairs)
      report
          .error("`model." + std::string(field) + "` has " + to_text(given) + " values, and RoPE rotates " +
                 to_text(pairs) + " pairs")
          .help("give one factor for each pair, as `rope_scaling` of the model's config.json lists them");
    for (const double factor : factors)
      if (!(factor > 0)) {
        report
            .error("`model." + std::string(field) + "` has the factor " + to_text(factor) +
                   ", but wavelengths stay positive")
            .help("write factors above 0");
        break;
      }
  };
  check("rope_scaling_short_factors", m.rope_scaling_short_factors);
  check("rope_scaling_long_factors", m.rope_scaling_long_factors);
}

RULE("R0419", norm_across_heads_is_rms, "the norm across heads is an RMSNorm",
     "model.qk_layernorm_across_heads", "model.normalization") {
  if (!c.model.qk_layernorm || !c.model.qk_layernorm_across_heads ||
      c.model.normalization == Normalization::rms_norm)
    return;
  report.error("`model.qk_layernorm_across_heads` is an RMSNorm, but `model.normalization` is LayerNorm")
      .help("set model.normalization=RMSNorm, or model.qk_layernorm_across_heads=false");
}

RULE("R0420", residual_after_norm_needs_input_norms,
     "a residual that branches off after the norm needs norms before the blocks",
     "model.apply_residual_connection_post_layernorm", "model.norm_placement") {
  if (!c.model.apply_residual_connection_post_layernorm || c.model.norm_placement == NormPlacement::input)
    return;
  report
      .error(
          "`model.apply_residual_connection_post_layernorm` branches off after the norms before a block, and "
          "`model.norm_placement` is not input")
      .help("set model.norm_placement=input, or model.apply_residual_connection_post_layernorm=false");
}

RULE("R0412", window_below_sequence, "a sliding window is shorter than the sequence", "model.window_size",
     "model.seq_length") {
  if (!c.model.window_size || *c.model.window_size < c.model.seq_length) return;
  report
      .warning("`model.window_size` " + to_text(*c.model.window_size) + " masks no token in sequences of " +
               counted(c.model.seq_length, "token"))
      .help("unset model.window_size, or make it less than " + to_text(c.model.seq_length));
}

RULE("R0413", qkv_bias_is_extra, "add_qkv_bias is for models without other biases", "model.add_qkv_bias",
     "model.add_bias_linear") {
  if (!c.model.add_qkv_bias || !c.model.add_bias_linear) return;
  report.warning("`model.add_qkv_bias` has no effect where `model.add_bias_linear` is true")
      .help("unset model.add_qkv_bias");
}

RULE("R0424", architecture_fits, "the fields of the model section agree with its architecture",
     "model.architecture", "model.multi_latent_attention", "model.num_moe_experts") {
  const std::string conflict = architecture_conflict(c.model);
  if (conflict.empty()) return;
  report
      .error("`model.architecture` is " + std::string(enum_name(*c.model.architecture)) + ", but " + conflict)
      .help("set model.architecture=" + std::string(enum_name(derived_architecture(c.model))) +
            ", which these fields describe, or change the field");
}

RULE("R0425", parallel_layer_has_input_norms, "the layers of architecture gpt_neox have norms of inputs",
     "model.architecture", "model.norm_placement", "model.apply_residual_connection_post_layernorm") {
  if (c.model.architecture != Architecture::gpt_neox) return;
  if (c.model.norm_placement != NormPlacement::input)
    report
        .error("`model.architecture` is gpt_neox, but `model.norm_placement` is " +
               std::string(enum_name(c.model.norm_placement)))
        .help("set model.norm_placement=input");
  if (c.model.apply_residual_connection_post_layernorm)
    report
        .error(
            "`model.architecture` is gpt_neox, whose residual is the layer's input, but "
            "`model.apply_residual_connection_post_layernorm` is true")
        .help("set model.apply_residual_connection_post_layernorm=false");
}

RULE("R0414", latent_attention_excludes_groups, "multi-latent attention excludes grouped queries",
     "model.multi_latent_attention", "model.num_query_groups", "model.num_attention_heads") {
  if (!c.model.multi_latent_attention || !c.model.num_query_groups ||
      *c.model.num_query_groups == c.model.num_attention_heads)
    return;
  report
      .error("`model.multi_latent_attention` and grouped queries exclude each other: num_query_groups is " +
             to_text(*c.model.num_query_groups) + ", num_attention_heads " +
             to_text(c.model.num_attention_heads))
      .help("unset model.num_query_groups");
}

RULE("R0415", latent_attention_has_own_rope,
     "multi-latent attention, which always rotates pairs of neighbors, excludes rotary_interleaved",
     "model.multi_latent_attention", "model.rotary_interleaved") {
  if (!c.model.multi_latent_attention || !c.model.rotary_interleaved) return;
  report.error("`model.multi_latent_attention` and `model.rotary_interleaved` exclude each other")
      .help("set model.rotary_interleaved=false");
}

RULE("R0421", latent_attention_has_rope, "multi-latent attention needs RoPE", "model.multi_latent_attention",
     "model.position_embedding_type", "model.qk_pos_emb_head_dim") {
  if (!c.model.multi_latent_attention || c.model.position_embedding_type == PositionEmbedding::rope) return;
  report
      .error(
          "`model.multi_latent_attention` applies RoPE to `model.qk_pos_emb_head_dim` elements of each head, "
          "but `model.position_embedding_type` is " +
          std::string(enum_name(c.model.position_embedding_type)))
      .help("set model.position_embedding_type=rope");
}

RULE("R0422", latent_projections_have_no_bias,
     "the query and key/value projections of multi-latent attention have no biases",
     "model.multi_latent_attention", "model.add_qkv_bias") {
  if (!c.model.multi_latent_attention || !c.model.add_qkv_bias) return;
  report
      .error(
          "`model.add_qkv_bias` is true, but the query and key/value projections of "
          "`model.multi_latent_attention` have no biases")
      .help("set model.add_qkv_bias=false");
}

RULE("R0423", latent_norm_is_of_compressed, "multi-latent attention excludes the norm across heads",
     "model.multi_latent_attention", "model.qk_layernorm_across_heads", "model.qk_layernorm") {
  if (!c.model.multi_latent_attention || !c.model.qk_layernorm || !c.model.qk_layernorm_across_heads) return;
  report
      .error(
          "`model.qk_layernorm_across_heads` normalizes heads, but `model.multi_latent_attention` normalizes "
          "what they are projected from")
      .help("set model.qk_layernorm_across_heads=false");
}

// The ranks among which heads are exchanged for the sequence; 1: none.
int64_t exchanging_ranks(const Config& c) {
  int64_t ranks = 1;
  if (c.dist.context_parallel_size == 1) return ranks;
  for (const CpCommType type : c.dist.cp_comm_type) {
    if (type == CpCommType::a2a) ranks = std::max(ranks, c.dist.context_parallel_size);
    if (type == CpCommType::a2a_p2p && !c.dist.hierarchical_context_parallel_sizes.empty())
      ranks = std::max(ranks, c.dist.hierarchical_context_parallel_sizes[0]);
  }
  return ranks;
}

RULE("R0416", all_to_all_divides_heads,
     "all-to-all context parallelism (cp_comm_type a2a) needs num_attention_heads divisible by tensor * "
     "context parallelism",
     "dist.cp_comm_type", "dist.context_parallel_size", "model.num_attention_heads",
     "dist.tensor_model_parallel_size") {
  const int64_t ranks = exchanging_ranks(c);
  const auto needed = product_of({ranks, tp(c)});
  if (ranks == 1 || !needed || c.model.num_attention_heads % *needed == 0) return;
  report
      .error("`dist.cp_comm_type` a2a exchanges heads over " + to_text(ranks) +
             " ranks, but `model.num_attention_heads` " + to_text(c.model.num_attention_heads) +
             " is not divisible by tensor * context = " + product_text({tp(c), ranks}))
      .help("set dist.cp_comm_type=p2p, or a context_parallel_size that divides the heads of a rank");
}

// The groups of a tensor-parallel rank are shared out over the exchange, or each is held by several of its
// ranks.
RULE("R0417", all_to_all_divides_groups,
     "with all-to-all context parallelism (cp_comm_type a2a), the key/value heads of a tensor-parallel rank "
     "are a multiple or a divisor of the ranks that exchange heads",
     "dist.cp_comm_type", "dist.context_parallel_size", "model.num_query_groups",
     "dist.tensor_model_parallel_size") {
  const int64_t ranks = exchanging_ranks(c);
  if (ranks == 1 || !c.model.num_query_groups || tp(c) < 1) return;
  const int64_t here = std::max<int64_t>(1, *c.model.num_query_groups / tp(c));
  if (here % ranks == 0 || ranks % here == 0) return;
  report
      .error("`dist.cp_comm_type` a2a exchanges heads over " + to_text(ranks) +
             " ranks, but the number of key/value heads of a tensor-parallel rank, " + to_text(here) +
             ", is neither a multiple nor a divisor of that")
      .help("set dist.cp_comm_type=p2p, or a context_parallel_size that divides model.num_query_groups");
}

}  // namespace

}  // namespace capstan::config

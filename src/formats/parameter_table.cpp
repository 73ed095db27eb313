#include "formats/parameter_table.hpp"

#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "config/sections/moe_layers.hpp"

namespace capstan::formats {

namespace {

using config::ModelConfig;
using config::NormPlacement;

std::string numbered(const std::string& text, int64_t number) {
  const size_t at = text.find("{}");
  return at == std::string::npos ? text : text.substr(0, at) + std::to_string(number) + text.substr(at + 2);
}

class Builder {
 public:
  Builder(const ModelConfig& model, const TensorNames& names) : m_(model), n_(names) {
    CAPSTAN_ASSERT(m_.kv_channels && m_.num_query_groups && m_.ffn_hidden_size && m_.padded_vocab_size &&
                       m_.max_position_embeddings && m_.add_attention_output_bias && m_.add_mlp_bias,
                   "a model section with its derived values");
    CAPSTAN_ASSERT(!m_.num_moe_experts || m_.moe_ffn_hidden_size, "the width of the experts");
    head_ = *m_.kv_channels;
    groups_ = *m_.num_query_groups;
    q_rows_ = checked_mul(m_.num_attention_heads, head_);
    kv_rows_ = checked_mul(groups_, head_);
    CAPSTAN_ASSERT(groups_ > 0 && m_.num_attention_heads % groups_ == 0,
                   "query heads are a multiple of the groups");
  }

  ArrangementTable build() {
    const bool tied = m_.share_embeddings_and_output_weights;
    vocabulary("embedding.word_embeddings.weight", n_.embedding);
    if (m_.position_embedding_type == config::PositionEmbedding::learned_absolute)
      add_full("embedding.position_embeddings.weight", named(n_.positions, "learned positions") + ".weight",
               {*m_.max_position_embeddings, m_.hidden_size});
    for (layer_ = 0; layer_ < m_.num_layers; ++layer_)
      one_layer("decoder.layers." + std::to_string(layer_) + ".", config::is_moe_layer(m_, layer_));
    for (int64_t depth = 0; depth < m_.mtp_num_layers.value_or(0); ++depth) mtp_layer(depth);
    norm("decoder.final_layernorm", n_.final_norm, m_.hidden_size);
    if (!tied) vocabulary("output_layer.weight", named(n_.head, "a head of its own"));
    return std::move(table_);
  }

 private:
  void mtp_layer(int64_t depth) {
    if (n_.mtp_projection.empty())
      fail(ErrorCode::unsupported,
           "the format has no names for layers of multi-token prediction (model.mtp_num_layers)",
           "only DeepSeek-V3's files hold them; a run without model.mtp_num_layers that starts from the "
           "weights (checkpoint.pretrained_checkpoint) leaves them out");
    layer_ = m_.num_layers + depth;
    const std::string ours = "mtp.layers." + std::to_string(depth) + ".", theirs = numbered(n_.layer, layer_);
    const int64_t h = m_.hidden_size;
    norm(ours + "enorm", theirs + n_.mtp_embedding_norm, h);
    norm(ours + "hnorm", theirs + n_.mtp_hidden_norm, h);
    linear(ours + "eh_proj", theirs + n_.mtp_projection, h, 2 * h, false);
    one_layer(ours + "transformer_layer.", config::is_moe_layer(m_, m_.num_layers - 1));
    norm(ours + "final_layernorm", theirs + n_.mtp_final_norm, h);
  }

  void one_layer(const std::string& ours, bool has_experts) {
    const std::string theirs = numbered(n_.layer, layer_);
    const bool before = m_.norm_placement != NormPlacement::output,
               after = m_.norm_placement != NormPlacement::input;
    const int64_t h = m_.hidden_size;
    if (before) norm(ours + "input_layernorm", theirs + named(n_.input_norm, "norms of inputs"), h);
    attention(ours + "self_attention.", theirs);
    if (after)
      norm(ours + "post_attention_layernorm", theirs + named(n_.post_attention_norm, "norms of outputs"), h);
    if (before) norm(ours + "pre_mlp_layernorm", theirs + named(n_.mlp_norm, "norms of inputs"), h);
    if (has_experts)
      experts(ours + "mlp.", theirs);
    else
      feed_forward(ours + "mlp.", theirs);
    if (after)
      norm(ours + "post_feedforward_layernorm", theirs + named(n_.post_mlp_norm, "norms of outputs"), h);
  }

  void latent_attention(const std::string& ours, const std::string& theirs) {
    const int64_t heads = m_.num_attention_heads, h = m_.hidden_size,
                  q_rows = checked_mul(heads, m_.qk_head_dim + m_.qk_pos_emb_head_dim);
    const std::string& kv_down = named(n_.kv_down, "latent attention");
    if (m_.q_lora_rank) {
      linear(ours + "linear_q_down_proj", theirs + n_.q_down, *m_.q_lora_rank, h, false);
      if (m_.qk_layernorm) norm(ours + "q_layernorm", theirs + n_.q_norm, *m_.q_lora_rank);
      linear(ours + "linear_q_up_proj", theirs + n_.q_up, q_rows, *m_.q_lora_rank, false);
    } else {
      linear(ours + "linear_q_proj", theirs + n_.q, q_rows, h, false);
    }
    linear(ours + "linear_kv_down_proj", theirs + kv_down, m_.kv_lora_rank + m_.qk_pos_emb_head_dim, h,
           false);
    if (m_.qk_layernorm) norm(ours + "kv_layernorm", theirs + n_.kv_norm, m_.kv_lora_rank);
    linear(ours + "linear_kv_up_proj", theirs + n_.kv_up, checked_mul(heads, m_.qk_head_dim + m_.v_head_dim),
           m_.kv_lora_rank, false);
    linear(ours + "linear_proj", theirs + n_.output, h, checked_mul(heads, m_.v_head_dim),
           *m_.add_attention_output_bias);
  }

  void attention(const std::string& ours, const std::string& theirs) {
    if (m_.softmax_type == config::SoftmaxType::learnable)
      add_full(ours + "core_attention.softmax_offset", theirs + named(n_.sinks, "attention sinks"),
               {m_.num_attention_heads});
    if (m_.multi_latent_attention) return latent_attention(ours, theirs);
    if (n_.qkv_by_group)
      linear(ours + "linear_qkv", theirs + n_.qkv, q_rows_ + 2 * kv_rows_, m_.hidden_size, has_qkv_bias());
    else
      rearranged_qkv(ours, theirs);
    if (m_.qk_layernorm) {
      const bool all = m_.qk_layernorm_across_heads;
      norm(ours + "q_layernorm", theirs + named(n_.q_norm, "norms of queries and keys"),
           all ? q_rows_ : head_);
      norm(ours + "k_layernorm", theirs + n_.k_norm, all ? kv_rows_ : head_);
    }
    linear(ours + "linear_proj", theirs + n_.output, m_.hidden_size, q_rows_, *m_.add_attention_output_bias);
  }

  bool has_qkv_bias() const { return m_.add_bias_linear || m_.add_qkv_bias; }

  // From all rows of q, then of k, then of v, separate or fused.
  void rearranged_qkv(const std::string& ours, const std::string& theirs) {
    std::vector<Segment> segments;
    const auto add = [&](const std::string& separate, int64_t fused_begin, int64_t begin, int64_t source,
                         int64_t count, bool rotated) {
      const bool fused = !n_.qkv.empty();
      const std::string name = theirs + (fused ? n_.qkv : separate);
      source += fused ? fused_begin : 0;
      if (!n_.rope_in_pairs || !rotated) {
        segments.push_back({name, begin, source, count});
        return;
      }
      // Element j of the first half of a head is element 2 j in the file, and element j of the second half is
      // 2 j + 1.
      for (int64_t row = 0; row < count; ++row) {
        const int64_t in_head = row % head_, half = head_ / 2;
        segments.push_back(
            {name, begin + row, source + row - in_head + 2 * (in_head % half) + in_head / half, 1});
      }
    };
    const int64_t q_of_group = q_rows_ / groups_;
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t begin = group * (q_of_group + 2 * head_);
      add(n_.q, 0, begin, group * q_of_group, q_of_group, true);
      add(n_.k, q_rows_, begin + q_of_group, group * head_, head_, true);
      add(n_.v, q_rows_ + kv_rows_, begin + q_of_group + head_, group * head_, head_, false);
    }
    const std::map<std::string, int64_t> rows =
        n_.qkv.empty() ? std::map<std::string, int64_t>{{theirs + n_.q, q_rows_},
                                                        {theirs + n_.k, kv_rows_},
                                                        {theirs + n_.v, kv_rows_}}
                       : std::map<std::string, int64_t>{{theirs + n_.qkv, q_rows_ + 2 * kv_rows_}};
    linear(ours + "linear_qkv", std::move(segments), rows, m_.hidden_size, has_qkv_bias());
  }

  void feed_forward(const std::string& ours, const std::string& theirs) {
    const int64_t ffn = *m_.ffn_hidden_size, h = m_.hidden_size;
    const bool bias = *m_.add_mlp_bias;
    if (!m_.gated_linear_unit) {
      linear(ours + "linear_fc1", theirs + named(n_.fc1, "a feed-forward network without a gate"), ffn, h,
             bias);
    } else if (!n_.gate_up.empty()) {
      linear(ours + "linear_fc1", theirs + n_.gate_up, 2 * ffn, h, bias);
    } else {
      const std::string gate = theirs + named(n_.gate, "a gated feed-forward network"), up = theirs + n_.up;
      linear(ours + "linear_fc1", {{gate, 0, 0, ffn}, {up, ffn, 0, ffn}}, {{gate, ffn}, {up, ffn}}, h, bias);
    }
    linear(ours + "linear_fc2", theirs + n_.down, h, ffn, bias);
  }

  void experts(const std::string& ours, const std::string& theirs) {
    const int64_t count = *m_.num_moe_experts, ffn = *m_.moe_ffn_hidden_size, h = m_.hidden_size;
    add_full(ours + "router.weight", theirs + named(n_.router, "experts") + ".weight", {count, h});
    if (!m_.gated_linear_unit) fail_without_names("experts without a gate");
    if (!n_.experts_gate_up.empty()) return experts_of_one_tensor(ours, theirs);
    if (!n_.stacked_gate.empty()) return experts_of_one_projection(ours, theirs);
    if (*m_.add_mlp_bias) fail_without_names("experts with biases");
    if (m_.moe_router_enable_expert_bias)
      add_full(ours + "router.expert_bias", theirs + named(n_.expert_bias, "the bias of each expert"),
               {count});
    stacked(ours + "experts.linear_fc1.weight",
            {{theirs + n_.expert_gate, ffn}, {theirs + n_.expert_up, ffn}}, h);
    stacked(ours + "experts.linear_fc2.weight", {{theirs + n_.expert_down, h}}, ffn);
    if (!m_.moe_shared_expert_intermediate_size) return;
    const int64_t shared = *m_.moe_shared_expert_intermediate_size;
    const std::string gate = theirs + named(n_.shared_gate, "a shared expert"), up = theirs + n_.shared_up;
    linear(ours + "shared_experts.linear_fc1", {{gate, 0, 0, shared}, {up, shared, 0, shared}},
           {{gate, shared}, {up, shared}}, h, false);
    linear(ours + "shared_experts.linear_fc2", theirs + n_.shared_down, h, shared, false);
    if (m_.moe_shared_expert_gate)
      add_full(ours + "shared_experts.gate_weight",
               theirs + named(n_.shared_expert_gate, "a gate of the shared expert") + ".weight", {1, h});
  }

  void experts_of_one_tensor(const std::string& ours, const std::string& theirs) {
    const int64_t count = *m_.num_moe_experts, ffn = *m_.moe_ffn_hidden_size, h = m_.hidden_size;
    if (m_.moe_shared_expert_intermediate_size) fail_without_names("a shared expert");
    if (m_.moe_router_enable_expert_bias) fail_without_names("the bias of each expert");
    transposed(ours + "experts.linear_fc1.weight", theirs + n_.experts_gate_up, h, 2 * ffn, true);
    transposed(ours + "experts.linear_fc2.weight", theirs + n_.experts_down, ffn, h, false);
    if (!*m_.add_mlp_bias) return;
    add_full(ours + "router.bias", theirs + n_.router + ".bias", {count});
    add_full(ours + "experts.linear_fc2.bias", theirs + n_.experts_down_bias, {count, h});
    const std::string gate_up = theirs + n_.experts_gate_up_bias;
    table_.sources[gate_up] = {count, 2 * ffn};
    table_.targets[ours + "experts.linear_fc1.bias"] = {{count, 2 * ffn}, 1, 1, alternating(gate_up, 0, ffn)};
  }

  void experts_of_one_projection(const std::string& ours, const std::string& theirs) {
    const int64_t count = *m_.num_moe_experts, ffn = *m_.moe_ffn_hidden_size, h = m_.hidden_size;
    if (m_.moe_shared_expert_intermediate_size) fail_without_names("a shared expert");
    if (m_.moe_router_enable_expert_bias) fail_without_names("the bias of each expert");
    const std::string gate = theirs + n_.stacked_gate, up = theirs + n_.stacked_up,
                      down = theirs + n_.stacked_down;
    Arrangement& fc1 = table_.targets[ours + "experts.linear_fc1.weight"];
    Arrangement& fc2 = table_.targets[ours + "experts.linear_fc2.weight"];
    fc1.shape = {count, 2 * ffn, h}, fc2.shape = {count, h, ffn};
    for (int64_t expert = 0; expert < count; ++expert) {
      const int64_t first = checked_mul(expert, ffn);
      fc1.segments.push_back({gate + ".weight", 2 * first, first, ffn});
      fc1.segments.push_back({up + ".weight", 2 * first + ffn, first, ffn});
      fc2.segments.push_back({down + ".weight", checked_mul(expert, h), expert * h, h});
    }
    table_.sources[gate + ".weight"] = table_.sources[up + ".weight"] = {count, ffn, h};
    table_.sources[down + ".weight"] = {count, h, ffn};
    if (!*m_.add_mlp_bias) return;
    add_full(ours + "router.bias", theirs + n_.router + ".bias", {count});
    add_full(ours + "experts.linear_fc2.bias", down + ".bias", {count, h});
    table_.sources[gate + ".bias"] = table_.sources[up + ".bias"] = {count, ffn};
    table_.targets[ours + "experts.linear_fc1.bias"] = {
        {count, 2 * ffn}, 1, 1, {{gate + ".bias", 0, 0, ffn}, {up + ".bias", ffn, 0, ffn}}};
  }

  // Gate, then up, of slices that alternate in the source.
  static std::vector<Segment> alternating(const std::string& source, int64_t begin, int64_t ffn) {
    return {{source, begin, begin, ffn, 1, 2}, {source, begin + ffn, begin + 1, ffn, 1, 2}};
  }

  // Matrices [out, in] of all experts, of a file's tensor [experts, in, out].
  void transposed(const std::string& ours, const std::string& theirs, int64_t in, int64_t out,
                  bool alternates) {
    const int64_t experts = *m_.num_moe_experts;
    Arrangement& target = table_.targets[ours];
    target.shape = {experts, out, in};
    target.source_dimension = 1;
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t begin = checked_mul(expert, out);
      std::vector<Segment> segments{{theirs, begin, begin, out}};
      if (alternates) segments = alternating(theirs, begin, out / 2);
      target.segments.insert(target.segments.end(), segments.begin(), segments.end());
    }
    table_.sources[theirs] = {experts, in, out};
  }

  // Matrices [out, in] of all experts, each of the rows of several files' matrices, named without ".weight".
  void stacked(const std::string& ours, const std::vector<std::pair<std::string, int64_t>>& parts,
               int64_t in) {
    Arrangement& target = table_.targets[ours];
    int64_t row = 0;
    for (int64_t expert = 0; expert < *m_.num_moe_experts; ++expert)
      for (const auto& [pattern, rows] : parts) {
        const std::string name = numbered(pattern, expert) + ".weight";
        target.segments.push_back({name, row, 0, rows});
        table_.sources[name] = {rows, in};
        row = checked_add(row, rows);
      }
    target.shape = {*m_.num_moe_experts, row / *m_.num_moe_experts, in};
  }

  void linear(const std::string& ours, const std::string& theirs, int64_t out, int64_t in, bool bias) {
    linear(ours, {{theirs, 0, 0, out}}, {{theirs, out}}, in, bias);
  }
  // The names in `segments` and `rows` lack ".weight".
  void linear(const std::string& ours, std::vector<Segment> segments,
              const std::map<std::string, int64_t>& rows, int64_t in, bool bias) {
    int64_t out = 0;
    for (const auto& [name, count] : rows) out = checked_add(out, count);
    for (const std::string suffix : {".weight", ".bias"}) {
      if (suffix == ".bias" && !bias) break;
      const bool flat = suffix == ".bias", transposed = n_.transposed && !flat;
      Arrangement& target = table_.targets[ours + suffix];
      target.shape = flat ? Shape{out} : Shape{out, in};
      target.source_dimension = transposed ? 1 : 0;
      for (const Segment& segment : segments)
        target.segments.push_back(
            {segment.source + suffix, segment.begin, segment.source_begin, segment.count});
      for (const auto& [name, count] : rows)
        table_.sources[name + suffix] = flat         ? Shape{count}
                                        : transposed ? Shape{in, count}
                                                     : Shape{count, in};
    }
  }

  void norm(const std::string& ours, const std::string& theirs, int64_t width) {
    add_full(ours + ".weight", theirs + ".weight", {width}).add = -n_.norm_add;
    if (m_.normalization == config::Normalization::layer_norm)
      add_full(ours + ".bias", theirs + ".bias", {width});
  }

  Arrangement& add_full(const std::string& ours, const std::string& theirs, const Shape& shape) {
    table_.sources[theirs] = shape;
    return table_.targets[ours] = {shape, 0, 0, {{theirs, 0, 0, shape[0]}}, 0};
  }
  void vocabulary(const std::string& ours, const std::string& theirs) {
    add_full(ours, theirs + ".weight", {m_.vocab_size, m_.hidden_size}).shape[0] = *m_.padded_vocab_size;
  }

  [[noreturn]] static void fail_without_names(const char* what) {
    fail(ErrorCode::unsupported, std::string("the format has no names for ") + what);
  }
  static const std::string& named(const std::string& name, const char* what) {
    if (name.empty()) fail_without_names(what);
    return name;
  }

  const ModelConfig& m_;
  const TensorNames& n_;
  int64_t head_ = 0, groups_ = 0, q_rows_ = 0, kv_rows_ = 0, layer_ = 0;
  ArrangementTable table_;
};

}  // namespace

ArrangementTable parameter_table(const ModelConfig& model, const TensorNames& names) {
  return Builder(model, names).build();
}

std::string layer_prefix(const TensorNames& names, int64_t layer) {
  return numbered(names.layer, layer);
}

std::vector<std::pair<std::string, std::string>> prediction_layer_copies(const ModelConfig& model,
                                                                         const TensorNames& names,
                                                                         int64_t depth) {
  const std::string layer = layer_prefix(names, model.num_layers + depth),
                    embedding = names.embedding + ".weight",
                    head = model.share_embeddings_and_output_weights ? embedding : names.head + ".weight";
  return {{layer + names.mtp_embedding + ".weight", embedding}, {layer + names.mtp_head + ".weight", head}};
}

ArrangementTable file_table(const ModelConfig& model, const TensorNames& names) {
  ArrangementTable table = inverted(parameter_table(model, names));
  for (int64_t depth = 0; depth < model.mtp_num_layers.value_or(0); ++depth)
    for (const auto& [copy, original] : prediction_layer_copies(model, names, depth))
      table.targets[copy] = table.targets.at(original);
  return table;
}

bool keeps_type(std::string_view name) {
  return name.ends_with(".expert_bias") || name.ends_with(".e_score_correction_bias");
}

}  // namespace capstan::formats

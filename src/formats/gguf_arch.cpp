#include "formats/gguf_arch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <set>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/sections/rotary.hpp"
#include "formats/model_section.hpp"

namespace capstan::formats {

using config::Activation;
using config::ModelConfig;
using config::RopeScaling;
using Kind = GgufValue::Kind;

namespace {

// `llama` includes Mistral and SmolLM2.
constexpr std::string_view kGptOss = "gpt-oss";
constexpr std::array<std::string_view, 7> kArchitectures = {"llama",  "qwen2", "qwen3", "gpt2",
                                                            "gemma2", "olmo2", kGptOss};

TensorNames names_of(std::string_view architecture) {
  TensorNames n;
  n.embedding = "token_embd";
  n.positions = "position_embd";
  n.final_norm = "output_norm";
  n.head = "output";
  n.layer = "blk.{}.";
  n.input_norm = "attn_norm";
  n.mlp_norm = "ffn_norm";
  n.q = "attn_q";
  n.k = "attn_k";
  n.v = "attn_v";
  n.output = "attn_output";
  n.gate = "ffn_gate";
  n.up = "ffn_up";
  n.down = "ffn_down";
  n.rope_in_pairs = architecture == "llama";
  if (architecture == "gpt2") {
    n.q = n.k = n.v = "";
    n.qkv = "attn_qkv";
    n.fc1 = "ffn_up";
    n.gate = n.up = "";
  }
  if (architecture == "qwen3" || architecture == "olmo2") {
    n.q_norm = "attn_q_norm";
    n.k_norm = "attn_k_norm";
  }
  if (architecture == "gemma2" || architecture == "olmo2") {
    n.post_attention_norm = "post_attention_norm";
    n.post_mlp_norm = "post_ffw_norm";
  }
  if (architecture == "olmo2") n.input_norm = n.mlp_norm = "";
  if (architecture == "gemma2") n.norm_add = 1;
  if (architecture == kGptOss) {
    n.mlp_norm = "post_attention_norm";
    n.sinks = "attn_sinks.weight";
    n.gate = n.up = n.down = "";
    n.router = "ffn_gate_inp";
    n.stacked_gate = "ffn_gate_exps";
    n.stacked_up = "ffn_up_exps";
    n.stacked_down = "ffn_down_exps";
  }
  return n;
}

// Metadata of one architecture. Each key is read once; unread keys are refused.
class Keys {
 public:
  Keys(const GgufFile& file, std::string architecture)
      : file_(file), prefix_(std::move(architecture) + ".") {}

  bool has(const std::string& key) const { return file_.metadata().count(prefix_ + key) > 0; }
  int64_t integer(const std::string& key, std::optional<int64_t> otherwise = {}) {
    const GgufValue* value = find(key, otherwise.has_value());
    if (!value) return *otherwise;
    if (value->kind != Kind::integer || value->integer < 1 || value->integer > (1 << 30))
      refuse(key, "is not an integer from 1 to 2^30");
    return value->integer;
  }
  double real(const std::string& key, std::optional<double> otherwise = {}) {
    const GgufValue* value = find(key, otherwise.has_value());
    if (!value) return *otherwise;
    if (value->kind == Kind::integer) return static_cast<double>(value->integer);
    if (value->kind != Kind::real || !std::isfinite(value->real)) refuse(key, "is not a finite number");
    return value->real;
  }
  std::string text(const std::string& key, const std::string& otherwise) {
    const GgufValue* value = find(key, true);
    if (!value) return otherwise;
    if (value->kind != Kind::text) refuse(key, "is not a text");
    return value->text;
  }
  void changes_nothing(const std::string& key) { read_.insert(prefix_ + key); }
  void finish() {
    std::vector<std::string> left;
    for (const auto& [key, value] : file_.metadata())
      if (key.starts_with(prefix_) && !read_.count(key)) left.push_back("`" + key + "`");
    if (!left.empty())
      fail(ErrorCode::unsupported,
           file_.description() + ": this version does not know what " + join(left, ", ") + " would change");
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& what) const {
    fail(ErrorCode::format, file_.description() + ": `" + prefix_ + key + "` " + what);
  }

 private:
  const GgufValue* find(const std::string& key, bool optional) {
    read_.insert(prefix_ + key);
    const auto found = file_.metadata().find(prefix_ + key);
    if (found != file_.metadata().end()) return &found->second;
    if (!optional) fail(ErrorCode::format, file_.description() + ": `" + prefix_ + key + "` is missing");
    return nullptr;
  }
  const GgufFile& file_;
  std::string prefix_;
  std::set<std::string> read_;
};

// Recovers the parameters of Llama 3.1's scaling from the factors in a file: low and high frequency factors,
// and the nearest original length.
void read_rope_factors(GgufFile& file, ModelConfig& m) {
  const auto& info = file.at(kRopeFactors);
  if (info.shape.size() != 1)
    fail(ErrorCode::format, file.description() + ": the tensor " + in_quotes(kRopeFactors) + " is " +
                                info.shape.text() + ", and should be a vector");
  std::vector<float> stored(static_cast<size_t>(info.shape.elements()));
  file.read_all(kRopeFactors, DType::f32, std::as_writable_bytes(std::span(stored)));
  m.rope_scaling = true;
  m.rope_scaling_type = RopeScaling::llama3;
  m.rope_scaling_factor = static_cast<double>(*std::max_element(stored.begin(), stored.end()));
  const bool fits = static_cast<int64_t>(stored.size()) == config::rotary_width(m) / 2;
  int64_t nearest = 0;
  // Relative tolerance, because converters compute in fp32.
  double least = 1e-4;
  for (const int64_t original : {8192, 4096, 2048, 16384, 32768, 1024, 512, 256, 128, 64, 32, 16}) {
    if (!fits) break;
    m.rope_scaling_original_max_position_embeddings = original;
    const auto made = llama3_factors(m);
    double most = 0;
    for (size_t i = 0; i < made.size() && most < least; ++i) {
      const double off = std::abs(static_cast<double>(stored[i]) / static_cast<double>(made[i]) - 1);
      // A NaN error counts as too large.
      most = off < least ? std::max(most, off) : least;
    }
    if (most < least) least = most, nearest = original;
  }
  m.rope_scaling_original_max_position_embeddings = nearest;
  if (nearest > 0) return;
  fail(ErrorCode::unsupported, file.description() + ": the tensor " + in_quotes(kRopeFactors) +
                                   " holds factors that are not those of Llama 3.1's scaling");
}

// What readers take for YaRN's bounds where a file has none.
constexpr double kBetaFast = 32, kBetaSlow = 1;

void read_rope(GgufFile& file, Keys& keys, ModelConfig& m, bool gpt_oss) {
  m.position_embedding_type = config::PositionEmbedding::rope;
  m.rotary_base = keys.real("rope.freq_base", 10000.0);
  const int64_t rotated = keys.integer("rope.dimension_count", *m.kv_channels);
  if (rotated > *m.kv_channels || rotated % 2 != 0)
    keys.refuse("rope.dimension_count",
                "is not an even number of a head's " + std::to_string(*m.kv_channels) + " elements");
  m.rotary_percent = static_cast<double>(rotated) / static_cast<double>(*m.kv_channels);
  const std::string scaling = keys.text("rope.scaling.type", "none");
  if (scaling == "linear") {
    m.rope_scaling = true;
    m.rope_scaling_type = RopeScaling::linear;
    m.rope_scaling_factor = keys.real("rope.scaling.factor");
  } else if (scaling == "yarn" && gpt_oss) {
    m.rope_scaling = true;
    m.rope_scaling_type = RopeScaling::yarn;
    m.rope_scaling_factor = keys.real("rope.scaling.factor");
    m.rope_scaling_original_max_position_embeddings = keys.integer("rope.scaling.original_context_length");
    m.rope_scaling_beta_fast = keys.real("rope.scaling.yarn_beta_fast", kBetaFast);
    m.rope_scaling_beta_slow = keys.real("rope.scaling.yarn_beta_slow", kBetaSlow);
  } else if (scaling != "none") {
    fail(ErrorCode::unsupported, file.description() + ": `rope.scaling.type` is " + in_quotes(scaling) +
                                     "; none, linear and, of gpt-oss, yarn are read");
  }
  if (file.find(kRopeFactors)) read_rope_factors(file, m);
}

// What a file of gpt-oss does not say, because readers compute nothing else.
void set_gpt_oss(ModelConfig& m) {
  m.normalization = config::Normalization::rms_norm;
  m.gated_linear_unit = true;
  m.activation_func = Activation::quick_gelu;
  m.activation_func_clamp_value = 7;
  m.glu_linear_offset = 1;
  m.softmax_type = config::SoftmaxType::learnable;
  m.add_bias_linear = false;
  m.add_qkv_bias = true;
  m.add_attention_output_bias = m.add_mlp_bias = true;
  m.window_attn_skip_freq = 2;
  m.rope_scaling_truncate = false;
  m.moe_router_load_balancing_type = config::RouterBalancing::none;
  m.moe_aux_loss_coeff = 0;
}

void read_gpt_oss(GgufFile& file, Keys& keys, ModelConfig& m) {
  set_gpt_oss(m);
  m.window_size = keys.integer("attention.sliding_window");
  m.num_moe_experts = keys.integer("expert_count");
  m.moe_router_topk = keys.integer("expert_used_count");
  m.moe_ffn_hidden_size = keys.integer("expert_feed_forward_length");
  if (m.moe_router_topk > *m.num_moe_experts) keys.refuse("expert_used_count", "is more than `expert_count`");
  // The parameter table has segments for each expert.
  const std::string name = "blk.0.ffn_gate_exps.weight";
  const Shape& gate = file.at(name).shape;
  if (gate.size() != 3 || gate[0] != *m.num_moe_experts)
    fail(ErrorCode::format, file.description() + ": its keys describe " + std::to_string(*m.num_moe_experts) +
                                " experts, but tensor " + in_quotes(name) + " is " + gate.text());
}

using Metadata = std::vector<std::pair<std::string, GgufValue>>;

Metadata sizes_of(const std::string& architecture, const ModelConfig& m) {
  const std::string a = architecture + ".";
  return {{a + "block_count", gguf_integer(m.num_layers)},
          {a + "context_length", gguf_integer(*m.max_position_embeddings)},
          {a + "embedding_length", gguf_integer(m.hidden_size)},
          {a + "feed_forward_length", gguf_integer(*m.ffn_hidden_size)},
          {a + "attention.head_count", gguf_integer(m.num_attention_heads)},
          {a + "attention.head_count_kv", gguf_integer(*m.num_query_groups)},
          {a + "vocab_size", gguf_integer(m.vocab_size)}};
}

[[noreturn]] void refuse_model(const std::string& architecture, const std::vector<std::string>& problems) {
  fail(ErrorCode::unsupported, "a GGUF file of the architecture " + architecture +
                                   " would not compute what this model does: " + join(problems, ", "));
}

// The model that a reader of gpt-oss makes of the numbers that a file of `m` has.
ModelConfig as_gpt_oss(const ModelConfig& m) {
  ModelConfig read;
  read.num_layers = m.num_layers, read.hidden_size = m.hidden_size;
  read.num_attention_heads = m.num_attention_heads, read.num_query_groups = m.num_query_groups;
  read.kv_channels = m.kv_channels, read.vocab_size = m.vocab_size;
  read.ffn_hidden_size = m.ffn_hidden_size, read.moe_ffn_hidden_size = m.moe_ffn_hidden_size;
  read.num_moe_experts = m.num_moe_experts, read.moe_router_topk = m.moe_router_topk;
  read.max_position_embeddings = m.max_position_embeddings, read.seq_length = m.seq_length;
  read.layernorm_epsilon = m.layernorm_epsilon;
  read.window_size = m.window_size;
  read.position_embedding_type = config::PositionEmbedding::rope;
  read.rotary_base = m.rotary_base, read.rotary_percent = m.rotary_percent;
  read.rope_scaling = m.rope_scaling, read.rope_scaling_type = RopeScaling::yarn;
  read.rope_scaling_factor = m.rope_scaling_factor;
  read.rope_scaling_original_max_position_embeddings = m.rope_scaling_original_max_position_embeddings;
  read.rope_scaling_beta_fast = m.rope_scaling_beta_fast;
  read.rope_scaling_beta_slow = m.rope_scaling_beta_slow;
  read.share_embeddings_and_output_weights = false;
  set_gpt_oss(read);
  fill_in(read);
  return read;
}

GgufPlan plan_gpt_oss(const ModelConfig& m) {
  const std::string a(kGptOss);
  std::vector<std::string> problems;
  for (const Difference& one : differences(as_gpt_oss(m), m))
    problems.push_back(one.path + "=" + one.second + " (" + a + " has " + one.first + ")");
  if (!m.window_size) problems.emplace_back("model.window_size=null");
  if (!problems.empty()) refuse_model(a, problems);
  GgufPlan plan{a, names_of(a), sizes_of(a, m), {}};
  const auto put = [&](const std::string& key, GgufValue value) {
    plan.metadata.emplace_back(a + "." + key, std::move(value));
  };
  put("attention.layer_norm_rms_epsilon", gguf_real(m.layernorm_epsilon));
  put("attention.key_length", gguf_integer(*m.kv_channels));
  put("attention.value_length", gguf_integer(*m.kv_channels));
  put("attention.sliding_window", gguf_integer(*m.window_size));
  put("expert_count", gguf_integer(*m.num_moe_experts));
  put("expert_used_count", gguf_integer(m.moe_router_topk));
  put("expert_feed_forward_length", gguf_integer(*m.moe_ffn_hidden_size));
  put("rope.freq_base", gguf_real(m.rotary_base));
  put("rope.dimension_count", gguf_integer(config::rotary_width(m)));
  if (!m.rope_scaling) return plan;
  put("rope.scaling.type", gguf_text("yarn"));
  put("rope.scaling.factor", gguf_real(m.rope_scaling_factor));
  put("rope.scaling.original_context_length", gguf_integer(m.rope_scaling_original_max_position_embeddings));
  if (m.rope_scaling_beta_fast != kBetaFast)
    put("rope.scaling.yarn_beta_fast", gguf_real(m.rope_scaling_beta_fast));
  if (m.rope_scaling_beta_slow != kBetaSlow)
    put("rope.scaling.yarn_beta_slow", gguf_real(m.rope_scaling_beta_slow));
  return plan;
}

}  // namespace

std::vector<float> llama3_factors(const ModelConfig& m) {
  const int64_t rotary = config::rotary_width(m);
  const auto original = static_cast<double>(m.rope_scaling_original_max_position_embeddings);
  const double low = m.rope_scaling_low_freq_factor, high = m.rope_scaling_high_freq_factor;
  std::vector<float> factors;
  for (int64_t i = 0; i < rotary / 2; ++i) {
    const double frequency =
        std::pow(m.rotary_base, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < original / high) {
      factors.push_back(1);
    } else if (wavelength > original / low) {
      factors.push_back(static_cast<float>(m.rope_scaling_factor));
    } else {
      const double smooth = (original / wavelength - low) / (high - low);
      factors.push_back(static_cast<float>(1 / ((1 - smooth) / m.rope_scaling_factor + smooth)));
    }
  }
  return factors;
}

GgufModel read_gguf_model(GgufFile& file) {
  GgufModel result;
  ModelConfig& m = result.model;
  const auto found = file.metadata().find("general.architecture");
  if (found == file.metadata().end() || found->second.kind != Kind::text)
    fail(ErrorCode::format, file.description() + ": `general.architecture` is missing");
  const std::string& a = result.architecture = found->second.text;
  if (std::find(kArchitectures.begin(), kArchitectures.end(), a) == kArchitectures.end()) {
    const std::vector<std::string> known(kArchitectures.begin(), kArchitectures.end());
    fail(ErrorCode::unsupported, file.description() + ": `general.architecture` is " + in_quotes(a) + "; " +
                                     join(known, ", ") + " are read");
  }
  result.names = names_of(a);
  Keys keys(file, a);
  const bool gpt2 = a == "gpt2";
  m.num_layers = keys.integer("block_count");
  m.hidden_size = keys.integer("embedding_length");
  m.num_attention_heads = keys.integer("attention.head_count");
  m.num_query_groups = keys.integer("attention.head_count_kv", m.num_attention_heads);
  if (m.num_attention_heads % *m.num_query_groups != 0)
    keys.refuse("attention.head_count", "is not a multiple of `attention.head_count_kv`");
  if (!keys.has("attention.key_length") && m.hidden_size % m.num_attention_heads != 0)
    keys.refuse("embedding_length", "is not a multiple of `attention.head_count`");
  m.kv_channels = keys.integer("attention.key_length", m.hidden_size / m.num_attention_heads);
  if (keys.integer("attention.value_length", *m.kv_channels) != *m.kv_channels)
    keys.refuse("attention.value_length", "is not `attention.key_length`");
  m.ffn_hidden_size = keys.integer("feed_forward_length");
  m.max_position_embeddings = keys.integer("context_length");
  m.seq_length = std::min<int64_t>(*m.max_position_embeddings, 2048);
  const auto& embedding = file.at("token_embd.weight").shape;
  m.vocab_size = embedding[0];
  keys.changes_nothing("vocab_size");
  m.hidden_dropout = m.attention_dropout = 0;
  m.share_embeddings_and_output_weights = !file.find("output.weight");
  const auto has_bias = [&](const std::string& name) {
    return file.find("blk.0." + name + ".bias") != nullptr;
  };
  if (gpt2) {
    m.layernorm_epsilon = keys.real("attention.layer_norm_epsilon");
    m.activation_func = Activation::gelu_tanh;
  } else {
    m.normalization = config::Normalization::rms_norm;
    m.layernorm_epsilon = keys.real("attention.layer_norm_rms_epsilon");
    m.gated_linear_unit = true;
    m.activation_func = a == "gemma2" ? Activation::gelu_tanh : Activation::silu;
    m.add_bias_linear = false;
    m.add_qkv_bias = has_bias("attn_q");
    m.add_attention_output_bias = has_bias("attn_output");
    m.add_mlp_bias = has_bias("ffn_down");
    read_rope(file, keys, m, a == kGptOss);
  }
  if (a == kGptOss) read_gpt_oss(file, keys, m);
  // Older converters omit the key for Gemma.
  if (a == "gemma2" || keys.has("attention.sliding_window"))
    m.window_size = keys.integer("attention.sliding_window", 4096);
  m.qk_layernorm = a == "qwen3" || a == "olmo2";
  m.qk_layernorm_across_heads = a == "olmo2";
  if (a == "olmo2") m.norm_placement = config::NormPlacement::output;
  if (a == "gemma2") {
    m.norm_placement = config::NormPlacement::both;
    m.layernorm_zero_centered_gamma = true;
    m.embedding_multiplier = std::sqrt(static_cast<double>(m.hidden_size));
    m.window_attn_skip_freq = 2;
    m.attn_logit_softcapping = keys.real("attn_logit_softcapping", 50.0);
    m.final_logit_softcapping = keys.real("final_logit_softcapping", 30.0);
    // The file does not contain the value. Among the published sizes only that of 27B differs from its head
    // size.
    if (m.num_layers == 46)
      m.softmax_scale =
          1 / std::sqrt(static_cast<double>(m.hidden_size) / static_cast<double>(m.num_attention_heads));
  }
  keys.finish();
  fill_in(m);
  // The parameter table has a segment for each row of these tensors, so their sizes in the file are used.
  const int64_t count = static_cast<int64_t>(file.names().size());
  const std::string name =
      "blk.0." + (result.names.qkv.empty() ? result.names.q : result.names.qkv) + ".weight";
  const auto& query = file.at(name).shape;
  int64_t rows = m.num_attention_heads * *m.kv_channels;
  if (!result.names.qkv.empty()) rows += 2 * *m.num_query_groups * *m.kv_channels;
  if (m.num_layers > count)
    fail(ErrorCode::format, file.description() + ": its keys describe " + std::to_string(m.num_layers) +
                                " layers, but it has " + std::to_string(count) + " tensors");
  if (rows != query[0])
    fail(ErrorCode::format, file.description() + ": its keys describe " + std::to_string(rows) +
                                " rows of heads, but tensor " + in_quotes(name) + " has " +
                                std::to_string(query[0]));
  return result;
}

GgufPlan plan_gguf(const ModelConfig& m) {
  if (m.num_moe_experts && m.softmax_type == config::SoftmaxType::learnable) return plan_gpt_oss(m);
  std::vector<std::string> problems;
  const auto need = [&](bool holds, const std::string& what) {
    if (!holds) problems.push_back(what);
  };
  std::string a;
  if (m.position_embedding_type == config::PositionEmbedding::learned_absolute)
    a = "gpt2";
  else if (m.norm_placement == config::NormPlacement::both)
    a = "gemma2";
  else if (m.norm_placement == config::NormPlacement::output)
    a = "olmo2";
  else if (m.qk_layernorm)
    a = "qwen3";
  else if (m.add_qkv_bias && !*m.add_attention_output_bias)
    a = "qwen2";
  else
    a = "llama";
  const bool gpt2 = a == "gpt2";
  const bool rope = m.position_embedding_type == config::PositionEmbedding::rope;
  Metadata data = sizes_of(a, m);
  const auto put = [&](const std::string& key, GgufValue value) {
    data.emplace_back(a + "." + key, std::move(value));
  };
  put(gpt2 ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon",
      gguf_real(m.layernorm_epsilon));
  if (!gpt2) {
    put("attention.key_length", gguf_integer(*m.kv_channels));
    put("attention.value_length", gguf_integer(*m.kv_channels));
  }
  GgufPlan plan{a, names_of(a), {}, {}};
  if (rope) {
    put("rope.freq_base", gguf_real(m.rotary_base));
    put("rope.dimension_count", gguf_integer(config::rotary_width(m)));
    if (m.rope_scaling && m.rope_scaling_type == RopeScaling::llama3) {
      plan.rope_factors = llama3_factors(m);
    } else if (m.rope_scaling && m.rope_scaling_type == RopeScaling::linear) {
      put("rope.scaling.type", gguf_text("linear"));
      put("rope.scaling.factor", gguf_real(m.rope_scaling_factor));
    } else {
      need(!m.rope_scaling, "model.rope_scaling_type: llama3 and linear are written");
    }
    need(plan.rope_factors.empty() || a == "llama", "model.rope_scaling_type=llama3 outside of llama");
    need(a != "llama" || m.rotary_percent == 1, "model.rotary_percent");
  } else {
    need(gpt2, "model.position_embedding_type");
  }
  // Readers apply a window to gemma2 only; a window as long as the context has no effect.
  if (m.window_size && a == "gemma2") put("attention.sliding_window", gguf_integer(*m.window_size));
  need(!m.window_size || a == "gemma2" || *m.window_size >= *m.max_position_embeddings, "model.window_size");
  const auto skip = m.window_attn_skip_freq.value_or(0);
  need(a != "gemma2" || (m.window_size && skip == 2), "model.window_attn_skip_freq");
  if (a == "gemma2") {
    need(m.attn_logit_softcapping && m.final_logit_softcapping, "model.attn_logit_softcapping");
    put("attn_logit_softcapping", gguf_real(m.attn_logit_softcapping.value_or(0)));
    put("final_logit_softcapping", gguf_real(m.final_logit_softcapping.value_or(0)));
  } else {
    need(!m.attn_logit_softcapping && !m.final_logit_softcapping, "model.attn_logit_softcapping");
  }
  need(m.softmax_type == config::SoftmaxType::vanilla, "model.softmax_type");
  const double width = a == "gemma2" && m.num_layers == 46
                           ? static_cast<double>(m.hidden_size) / static_cast<double>(m.num_attention_heads)
                           : static_cast<double>(*m.kv_channels);
  need(std::abs(*m.softmax_scale * std::sqrt(width) - 1) < 1e-9, "model.softmax_scale");
  need(m.embedding_multiplier.has_value() == (a == "gemma2"), "model.embedding_multiplier");
  need(m.layernorm_zero_centered_gamma == (a == "gemma2"), "model.layernorm_zero_centered_gamma");
  need(m.qk_layernorm == (a == "qwen3" || a == "olmo2"), "model.qk_layernorm");
  need(!m.qk_layernorm || m.qk_layernorm_across_heads == (a == "olmo2"), "model.qk_layernorm_across_heads");
  need(m.gated_linear_unit == !gpt2, "model.gated_linear_unit");
  const Activation activation = gpt2 || a == "gemma2" ? Activation::gelu_tanh : Activation::silu;
  need(m.activation_func == activation, "model.activation_func=" + std::string(enum_name(m.activation_func)) +
                                            " (" + a + " always computes " +
                                            std::string(enum_name(activation)) + ")");
  need(!m.activation_func_clamp_value && m.glu_linear_offset == 0, "model.activation_func_clamp_value");
  need((m.normalization == config::Normalization::layer_norm) == gpt2, "model.normalization");
  need(m.add_bias_linear == gpt2, "model.add_bias_linear");
  need(gpt2 || a == "llama" || (!*m.add_attention_output_bias && !*m.add_mlp_bias),
       "model.add_attention_output_bias");
  need(!m.rotary_interleaved, "model.rotary_interleaved");
  need(!m.apply_residual_connection_post_layernorm, "model.apply_residual_connection_post_layernorm");
  need(!m.num_moe_experts, "model.num_moe_experts");
  need(!m.mtp_num_layers, "model.mtp_num_layers");
  need(!m.multi_latent_attention, "model.multi_latent_attention");
  need(m.architecture != config::Architecture::gpt_neox, "model.architecture");
  if (!problems.empty()) refuse_model(a, problems);
  plan.metadata = std::move(data);
  return plan;
}

}  // namespace capstan::formats

#include "config/tools/shrink.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/checked.hpp"
#include "base/text.hpp"
#include "config/sections/pipeline_layout.hpp"

namespace capstan::config {

namespace {

// The small model, where the large one does not have less already.
constexpr int64_t kQuantizationBlock = 32, kHeadWidth = 16, kGroups = 2, kHeadsOfOne = 8, kHeads = 4,
                  kVocabulary = 512, kTokens = 64, kLayers = 2, kExperts = 8, kAdapterRank = 8, kSteps = 2,
                  kMicroBatches = 2, kSamples = 2, kChosenExperts = 2;

int64_t rounded(double value, int64_t multiple) {
  return std::max<int64_t>(1, std::llround(value / static_cast<double>(multiple))) * multiple;
}
double ratio(int64_t a, int64_t b) {
  return static_cast<double>(a) / static_cast<double>(b);
}

class Shrinker {
 public:
  Shrinker(const Resolution& recipe, std::optional<int64_t> ranks)
      : recipe_(recipe), m_(recipe.config.model), d_(recipe.config.dist), t_(recipe.config.train) {
    layout(ranks);
    heads();
    widths();
    layers();
    stages();
    tokens();
    positions();
    experts();
    adapters();
    batch();
    steps();
    sources();
  }
  Shrunk result() { return {std::move(out_), world_}; }

 private:
  bool by_user(const std::string& path) const { return recipe_.origin(path).kind == Origin::Kind::cli; }
  bool written(const std::string& path) const {
    const Origin::Kind kind = recipe_.origin(path).kind;
    return kind != Origin::Kind::default_value && kind != Origin::Kind::derived;
  }

  void impose(const std::string& path, const std::string& value) {
    out_.push_back(Override::token(path + "=" + value));
  }
  // Sets a field, unless the command line sets it. Returns the value in effect.
  int64_t set(const std::string& path, int64_t value, int64_t given) {
    if (by_user(path)) return given;
    if (value != given || !written(path)) impose(path, std::to_string(value));
    return value;
  }
  void set(const std::string& path, double value) {
    if (!by_user(path)) impose(path, to_text(value));
  }
  void set(const std::string& path, const std::string& value) {
    if (!by_user(path)) impose(path, value);
  }
  // Sets a field to null, so that its value is derived, unless the command line sets it.
  void leave_open(const std::string& path) {
    if (written(path) && !by_user(path)) impose(path, "null");
  }

  // ---- ranks ------------------------------------------------------------------------------------

  void layout(std::optional<int64_t> ranks) {
    int64_t left = ranks.value_or(INT64_MAX);
    const auto axis = [&](const std::string& path, int64_t size) {
      if (by_user(path)) {
        left = std::max<int64_t>(1, left / size);
        return size;
      }
      const int64_t small = size > 1 && left >= 2 && (!ranks || left % 2 == 0) ? 2 : 1;
      if (ranks) left /= small;
      return set(path, small, size);
    };
    tp_ = axis("dist.tensor_model_parallel_size", d_.tensor_model_parallel_size);
    pp_ = axis("dist.pipeline_model_parallel_size", d_.pipeline_model_parallel_size);
    cp_ = axis("dist.context_parallel_size", d_.context_parallel_size);
    dp_ = ranks ? left : std::min<int64_t>(2, d_.data_parallel_size.value_or(1));
    world_ = ranks.value_or(tp_ * pp_ * cp_ * dp_);
    const bool even =
        (cp_ * dp_) % 2 == 0 && std::min(m_.num_moe_experts.value_or(kExperts), kExperts) % 2 == 0;
    set("dist.expert_model_parallel_size", int64_t{d_.expert_model_parallel_size > 1 && even ? 2 : 1},
        d_.expert_model_parallel_size);
    for (const char* path :
         {"dist.data_parallel_size", "dist.expert_tensor_parallel_size", "dist.expert_data_parallel_size",
          "dist.num_layers_per_virtual_pipeline_stage", "dist.num_layers_in_first_pipeline_stage",
          "dist.num_layers_in_last_pipeline_stage", "dist.microbatch_group_size_per_vp_stage"})
      leave_open(path);
    if (d_.sequence_parallel && tp_ == 1) set("dist.sequence_parallel", std::string("false"));
    if (d_.virtual_pipeline_model_parallel_size.value_or(1) > 1) {
      vp_ = pp_ > 1 ? 2 : 1;
      set("dist.virtual_pipeline_model_parallel_size", std::string(pp_ > 1 ? "2" : "null"));
    }
    if (pp_ == 1) leave_open("dist.pipeline_schedule");
    // The head's weight gradient waits for the end of the pipeline.
    if (pp_ == 1 && recipe_.config.comm_overlap.defer_embedding_wgrad_compute)
      set("comm_overlap.defer_embedding_wgrad_compute", std::string("false"));
    if (d_.cp_comm_type.size() > 1)
      set("dist.cp_comm_type",
          "[" + std::string(EnumNames<CpCommType>::list[static_cast<size_t>(d_.cp_comm_type[0])].name) + "]");
    if (!d_.hierarchical_context_parallel_sizes.empty())
      set("dist.hierarchical_context_parallel_sizes", std::string(cp_ > 1 ? "[2, 1]" : "[]"));
    const int64_t groups = recipe_.config.ddp.num_distributed_optimizer_instances;
    if (groups > 1) set("ddp.num_distributed_optimizer_instances", int64_t{dp_ % 2 == 0 ? 2 : 1}, groups);
  }

  // ---- the model --------------------------------------------------------------------------------

  bool exchanges_heads() const {
    return std::any_of(d_.cp_comm_type.begin(), d_.cp_comm_type.end(), [](CpCommType type) {
      return type == CpCommType::a2a || type == CpCommType::a2a_p2p;
    });
  }

  void heads() {
    const int64_t all = m_.num_attention_heads, groups = m_.num_query_groups.value_or(all);
    const int64_t among = tp_ * (exchanges_heads() ? cp_ : 1);
    if (groups == all) {
      groups_ = heads_ = round_up(std::min(all, kHeads), among);
    } else {
      // Keeps the number of query heads per key head up to a limit; replicated key heads stay replicated.
      int64_t of_one = std::min(all / groups, kHeadsOfOne);
      groups_ = groups < d_.tensor_model_parallel_size ? 1 : std::min(groups, kGroups);
      if (by_user("model.num_query_groups")) groups_ = groups;
      groups_ = round_up(groups_, among / std::gcd(among, of_one));
      // The number of groups has to be a multiple or a divisor of the tensor-parallel size.
      if (groups_ % tp_ != 0 && tp_ % groups_ != 0) groups_ = round_up(groups_, std::lcm(among, tp_));
      heads_ = groups_ * of_one;
    }
    heads_ = set("model.num_attention_heads", heads_, all);
    groups_ = set("model.num_query_groups", groups_, groups);
    const int64_t width = m_.kv_channels.value_or(m_.hidden_size / all);
    if (m_.multi_latent_attention) return latent_heads(width);
    head_ = std::min(width, kHeadWidth);
    const double rotated = m_.rotary_percent * static_cast<double>(head_) / 2;
    if (m_.position_embedding_type == PositionEmbedding::rope && rotated != std::floor(rotated))
      head_ = width;
    head_ = set("model.kv_channels", head_, width);
    scale_softmax(width);
  }

  void scale_softmax(int64_t width) {
    if (written("model.softmax_scale") && m_.softmax_scale)
      set("model.softmax_scale", *m_.softmax_scale * std::sqrt(ratio(width, head_)));
  }

  // Latent attention: the widths of a head's parts, and of what they are projected from.
  void latent_heads(int64_t width) {
    if (m_.q_lora_rank) set("model.q_lora_rank", std::min<int64_t>(*m_.q_lora_rank, 32), *m_.q_lora_rank);
    set("model.kv_lora_rank", std::min<int64_t>(m_.kv_lora_rank, 32), m_.kv_lora_rank);
    const int64_t plain = set("model.qk_head_dim", std::min(m_.qk_head_dim, kHeadWidth), m_.qk_head_dim);
    rotated_ = set("model.qk_pos_emb_head_dim", std::min<int64_t>(m_.qk_pos_emb_head_dim, 8),
                   m_.qk_pos_emb_head_dim);
    set("model.v_head_dim", std::min(m_.v_head_dim, kHeadWidth), m_.v_head_dim);
    head_ = plain + rotated_;
    leave_open("model.kv_channels");
    scale_softmax(width);
  }

  bool quantized() const {
    return recipe_.config.peft && recipe_.config.peft->base_quantization != BaseQuantization::none;
  }
  // Of which widths are multiples: tensor parallelism does not divide blocks of quantized weights.
  int64_t width_unit(int64_t least) const {
    return quantized() ? kQuantizationBlock * tp_ : std::lcm(least, tp_);
  }

  void widths() {
    const int64_t width = m_.kv_channels.value_or(1) * m_.num_attention_heads;
    const int64_t unit = width_unit(8);
    hidden_ = m_.hidden_size == width
                  ? heads_ * head_
                  : rounded(static_cast<double>(heads_ * head_) * ratio(m_.hidden_size, width), unit);
    // Keeps the hidden size different from the heads' total width.
    if (m_.hidden_size != width && hidden_ == heads_ * head_) hidden_ += unit;
    hidden_ = set("model.hidden_size", std::min(hidden_, m_.hidden_size), m_.hidden_size);
    const int64_t ffn = m_.ffn_hidden_size.value_or(4 * m_.hidden_size);
    set("model.ffn_hidden_size",
        std::min(ffn, rounded(ratio(ffn, m_.hidden_size) * static_cast<double>(hidden_), unit)), ffn);
    if (quantized())
      set("peft.quantization_block", kQuantizationBlock, recipe_.config.peft->quantization_block);
    // A vocabulary that needs padding keeps a size that needs padding.
    const bool padded = m_.padded_vocab_size && *m_.padded_vocab_size != m_.vocab_size;
    int64_t vocabulary = kVocabulary;
    const int64_t multiple = m_.make_vocab_size_divisible_by;
    if (round_up(vocabulary, multiple) % tp_ != 0) vocabulary = round_up(vocabulary, std::lcm(multiple, tp_));
    if (m_.vocab_size > vocabulary) set("model.vocab_size", vocabulary - (padded ? 7 : 0), m_.vocab_size);
    leave_open("model.padded_vocab_size");
    if (m_.embedding_multiplier)
      set("model.embedding_multiplier", *m_.embedding_multiplier * std::sqrt(ratio(hidden_, m_.hidden_size)));
  }

  // Layers of every kind that the model has, in stages of equal size.
  void layers() {
    int64_t least = std::max(kLayers, m_.window_attn_skip_freq.value_or(1));
    const std::vector<int64_t>& freq = m_.moe_layer_freq.items;
    if (m_.num_moe_experts && freq.size() == 1)
      least = std::max(least, round_up(m_.moe_first_dense_layers, std::max<int64_t>(1, freq[0])) + 1);
    for (const int64_t kind : {0, 1})
      if (m_.num_moe_experts && freq.size() > 1)
        least = std::max<int64_t>(least, std::ranges::find(freq, kind) - freq.begin() + 1);
    const int64_t besides = pp_ == 1 ? 0
                                     : int64_t{d_.account_for_embedding_in_pipeline_split} +
                                           int64_t{d_.account_for_loss_in_pipeline_split};
    const int64_t few = round_up(least + besides, pp_ * vp_) - besides;
    layers_ = set("model.num_layers", std::min(few, m_.num_layers), m_.num_layers);
    if (m_.num_moe_experts && layers_ < std::ssize(freq)) {
      std::string first;
      for (int64_t layer = 0; layer < layers_; ++layer)
        first += (layer ? ", " : "[") + std::to_string(freq[static_cast<size_t>(layer)]);
      set("model.moe_layer_freq", first + "]");
    }
    if (written("model.recompute_num_layers") && m_.recompute_num_layers)
      set("model.recompute_num_layers", std::min<int64_t>(*m_.recompute_num_layers, 1),
          *m_.recompute_num_layers);
  }

  // Of equal size, unless multi-token prediction is in a stage before that of the loss, where it stays.
  void stages() {
    const char* const path = "dist.pipeline_model_parallel_layout";
    const auto large = pipeline_stages(recipe_.config);
    const auto apart = [](const PipelineStage& stage) { return stage.mtp_layers > 0 && !stage.loss; };
    if (pp_ == 1 || !large || std::ranges::none_of(*large, apart)) return leave_open(path);
    std::vector<PipelineStage> small(static_cast<size_t>(pp_ * vp_));
    const size_t last = small.size() - 1, with_layers = std::max<size_t>(1, last - 1);
    small.front().embedding = small.back().loss = true;
    small[last - 1].mtp_layers = *m_.mtp_num_layers;
    for (int64_t layer = 0; layer < layers_; ++layer)
      ++small[static_cast<size_t>(layer) * with_layers / static_cast<size_t>(layers_)].layers;
    set(path, pipeline_layout_text(small));
  }

  void tokens() {
    const int64_t large = m_.seq_length;
    seq_ = set("model.seq_length", std::min(large, round_up(kTokens, std::lcm(tp_, 2 * cp_))), large);
    if (m_.window_size && *m_.window_size < large) {
      set("model.window_size", std::clamp<int64_t>(scaled(*m_.window_size), 1, seq_ - 1), *m_.window_size);
    } else if (m_.window_size) {
      // The window is not smaller than the sequence, and would mask nothing.
      leave_open("model.window_size");
      leave_open("model.window_attn_skip_freq");
    }
    if (written("model.max_position_embeddings") && m_.max_position_embeddings)
      set("model.max_position_embeddings", std::max(seq_, scaled(*m_.max_position_embeddings)),
          *m_.max_position_embeddings);
  }
  int64_t scaled(int64_t count) const {
    return std::max<int64_t>(1, std::llround(static_cast<double>(count) * ratio(seq_, m_.seq_length)));
  }

  void positions() {
    if (m_.position_embedding_type != PositionEmbedding::rope || !m_.rope_scaling) return;
    const int64_t original = m_.rope_scaling_original_max_position_embeddings;
    set("model.rope_scaling_original_max_position_embeddings", scaled(original), original);
    const int64_t pairs = m_.multi_latent_attention
                              ? rotated_ / 2
                              : std::llround(m_.rotary_percent * static_cast<double>(head_)) / 2;
    const auto resample = [&](const char* path, const std::vector<double>& factors) {
      if (factors.empty() || static_cast<int64_t>(factors.size()) == pairs) return;
      std::string list;
      for (int64_t pair = 0; pair < pairs; ++pair)
        list += (pair ? ", " : "") +
                to_text(factors[static_cast<size_t>(pair) * factors.size() / static_cast<size_t>(pairs)]);
      set(path, "[" + list + "]");
    };
    resample("model.rope_scaling_short_factors", m_.rope_scaling_short_factors);
    resample("model.rope_scaling_long_factors", m_.rope_scaling_long_factors);
  }

  void experts() {
    if (!m_.num_moe_experts) return;
    const int64_t count =
        set("model.num_moe_experts", std::min(*m_.num_moe_experts, kExperts), *m_.num_moe_experts);
    const int64_t chosen = set("model.moe_router_topk", std::min({m_.moe_router_topk, count, kChosenExperts}),
                               m_.moe_router_topk);
    expert_groups(count, chosen);
    const int64_t unit = width_unit(16);
    const auto narrow = [&](const char* path, std::optional<int64_t> width) {
      if (width && written(path))
        set(path,
            std::min(*width, rounded(ratio(*width, m_.hidden_size) * static_cast<double>(hidden_), unit)),
            *width);
    };
    narrow("model.moe_ffn_hidden_size", m_.moe_ffn_hidden_size);
    narrow("model.moe_shared_expert_intermediate_size", m_.moe_shared_expert_intermediate_size);
  }

  // Groups of at least two experts, as many of them chosen in proportion, but never all; no groups where that
  // leaves a token fewer experts than it takes.
  void expert_groups(int64_t experts, int64_t chosen) {
    const int64_t all = m_.moe_router_num_groups.value_or(1), kept = m_.moe_router_group_topk.value_or(1);
    const int64_t score = m_.moe_router_group_score_topk.value_or(1);
    int64_t groups = std::min(all, experts / std::max<int64_t>(2, std::min(score, chosen)));
    while (groups > 1 && experts % groups != 0) --groups;
    const int64_t few =
        groups > 1 ? std::clamp<int64_t>(std::llround(ratio(kept * groups, all)), 1, groups - 1) : 1;
    if (groups < 2 || few * (experts / groups) < chosen) {
      leave_open("model.moe_router_num_groups");
      leave_open("model.moe_router_group_topk");
      leave_open("model.moe_router_group_score_topk");
      return;
    }
    groups = set("model.moe_router_num_groups", groups, all);
    set("model.moe_router_group_topk", few, kept);
    if (written("model.moe_router_group_score_topk"))
      set("model.moe_router_group_score_topk", std::min(score, experts / groups), score);
  }

  void adapters() {
    if (!recipe_.config.peft) return;
    const PeftConfig& peft = *recipe_.config.peft;
    const int64_t rank = set("peft.dim", std::min(peft.dim, kAdapterRank), peft.dim);
    if (rank != peft.dim) set("peft.alpha", peft.alpha * ratio(rank, peft.dim));
    move_layers("peft.target_modules", peft.target_modules);
    move_layers("peft.exclude_modules", peft.exclude_modules);
  }
  // Patterns that number a layer (*.layers.20.*.linear_qkv) name the one at the same fraction of the depth.
  void move_layers(const char* path, const std::vector<std::string>& patterns) {
    constexpr std::string_view kLayer = "layers.";
    std::vector<std::string> moved;
    for (std::string pattern : patterns) {
      const size_t at = pattern.find(kLayer), begin = at + kLayer.size();
      size_t end = begin;
      while (at != std::string::npos && end < pattern.size() && pattern[end] >= '0' && pattern[end] <= '9')
        ++end;
      if (at != std::string::npos && end > begin)
        if (const auto layer = parse_int(std::string_view(pattern).substr(begin, end - begin)))
          pattern.replace(begin, end - begin, std::to_string(*layer * layers_ / m_.num_layers));
      if (std::find(moved.begin(), moved.end(), pattern) == moved.end()) moved.push_back(std::move(pattern));
    }
    if (moved == patterns) return;
    std::string list;
    for (const std::string& pattern : moved) list += (list.empty() ? "'" : ", '") + pattern + "'";
    impose(path, "[" + list + "]");
  }

  // ---- the run ----------------------------------------------------------------------------------

  void batch() {
    const int64_t micro =
        set("train.micro_batch_size", std::min(t_.micro_batch_size, kSamples), t_.micro_batch_size);
    const int64_t count = pp_ > 1 ? 2 * pp_ : std::min(t_.num_microbatches.value_or(1), kMicroBatches);
    leave_open("train.num_microbatches");
    if (written("train.rampup_batch_size")) set("train.rampup_batch_size", std::string("[]"));
    set("train.global_batch_size", micro * dp_ * count, t_.global_batch_size.value_or(0));
    leave_open("validation.eval_global_batch_size");
    leave_open("validation.eval_micro_batch_size");
  }

  void steps() {
    const Config& c = recipe_.config;
    int64_t iterations = t_.train_iters.value_or(kSteps);
    // Generated data has no end.
    if (t_.epochs) {
      impose("train.epochs", "null");
      impose("train.train_iters", to_text(kSteps));
      iterations = kSteps;
    } else if (!by_user("train.train_samples")) {
      leave_open("train.train_samples");
      iterations = set("train.train_iters", kSteps, t_.train_iters.value_or(0));
    }
    leave_open("train.exit_interval");
    const double fraction = t_.train_iters ? ratio(iterations, *t_.train_iters) : t_.epochs ? 0 : 1;
    const auto part = [&](const char* path, std::optional<int64_t> count, int64_t least) {
      if (count && written(path))
        set(path,
            std::clamp<int64_t>(std::llround(fraction * static_cast<double>(*count)), least, iterations),
            *count);
    };
    part("scheduler.lr_warmup_iters", c.scheduler.lr_warmup_iters, 0);
    part("scheduler.lr_wsd_decay_iters", c.scheduler.lr_wsd_decay_iters, 1);
    for (const char* path : {"scheduler.lr_decay_iters", "scheduler.lr_decay_samples",
                             "scheduler.lr_warmup_samples", "scheduler.lr_wsd_decay_samples"})
      leave_open(path);
    if (c.validation.eval_interval) {
      set("validation.eval_interval", iterations, *c.validation.eval_interval);
      set("validation.eval_iters", int64_t{1}, c.validation.eval_iters);
    }
    if (c.checkpoint.save_interval) set("checkpoint.save_interval", iterations, *c.checkpoint.save_interval);
    leave_open("checkpoint.save_retain_interval");
    set("logger.log_interval", int64_t{1}, c.logger.log_interval);
  }

  // Removes everything that would be read, even if the command line names it, because those files are for the
  // model in its full size.
  void sources() {
    const Config& c = recipe_.config;
    if (!by_user("name")) impose("name", c.name + "-shrunk");
    impose("dataset.kind", "mock");
    impose("tokenizer.tokenizer_type", "none");
    if (c.checkpoint.pretrained_checkpoint) impose("checkpoint.pretrained_checkpoint", "null");
    if (c.checkpoint.load) impose("checkpoint.load", "null");
    if (c.checkpoint.save && !by_user("checkpoint.save")) impose("checkpoint.save", "null");
    if (!c.peft) return;
    impose("peft.random_base", "true");
    if (c.peft->adapter) impose("peft.adapter", "null");
  }

  const Resolution& recipe_;
  const ModelConfig& m_;
  const DistConfig& d_;
  const TrainConfig& t_;
  std::vector<Override> out_;
  int64_t tp_ = 1, pp_ = 1, cp_ = 1, dp_ = 1, vp_ = 1, world_ = 1;
  int64_t heads_ = 0, groups_ = 0, head_ = 0, rotated_ = 0, hidden_ = 0, seq_ = 0, layers_ = 0;
};

}  // namespace

Shrunk shrink(const Resolution& recipe, std::optional<int64_t> ranks) {
  return Shrinker(recipe, ranks).result();
}

namespace {
Resolution resolve_small(const Resolution& full, Request request) {
  Shrunk small = shrink(full, request.ranks);
  request.imposed = std::move(small.overrides);
  if (!request.ranks) {
    request.ranks = small.world;
    request.ranks_origin = request.imposed_by;
  }
  return resolve(request);
}

// The recipe on the ranks of the launch, which a layout of the command line may need. The batch of the recipe
// may be too small for so many; shrinking chooses another, unless the command line sets it.
Resolution resolve_launched(Request request, const Resolution& recipe) {
  if (recipe.origin("train.global_batch_size").kind != Origin::Kind::cli)
    request.imposed.push_back(Override::token("train.global_batch_size=null"));
  return resolve(request);
}

// Whether the recipe is right by itself and only breaks rules with the sizes of the command line, which are
// those of the small model.
bool only_sizes_are_wrong(const Resolution& full, Request request) {
  if (full.malformed || full.bad_words || !full.failed.empty() || request.overrides.empty()) return false;
  for (const Diagnostic& found : full.diagnostics)
    if (found.level == Level::error && !found.code.starts_with('R')) return false;
  request.overrides.clear();
  return resolve(request).ok();
}
}  // namespace

Resolution resolve_shrunk(const Request& request, ShrunkFrom* from) {
  Request any = request;
  any.ranks.reset();
  Resolution full = resolve(any);
  const bool shrinks = full.ok() || only_sizes_are_wrong(full, any);
  if (!shrinks && request.ranks) {
    Resolution launched = resolve_launched(request, full);
    if (count(launched.diagnostics, Level::error) <= count(full.diagnostics, Level::error))
      full = std::move(launched);
  }
  if (!shrinks && !full.ok()) return full;
  Resolution small = resolve_small(full, request);
  if (!from) return small;
  if (request.ranks && shrink(full, {}).world > small.config.dist.world_size)
    from->layout = resolve_small(full, any).config.dist;
  from->full = std::move(full);
  return small;
}

}  // namespace capstan::config

// Time of the layers of a stage (step_time.hpp).
#include <algorithm>
#include <array>

#include "planner/adapters.hpp"
#include "planner/collectives.hpp"
#include "planner/counts.hpp"
#include "planner/kernels.hpp"
#include "planner/linear_layers.hpp"
#include "planner/memory.hpp"
#include "planner/step_time.hpp"

namespace capstan::planner {

WorkTime& WorkTime::operator+=(const WorkTime& o) {
  gemm += o.gemm, attention += o.attention, memory += o.memory;
  tensor += o.tensor, context += o.context, expert += o.expert, offload += o.offload;
  tensor_hidden += o.tensor_hidden, context_hidden += o.context_hidden, expert_hidden += o.expert_hidden;
  offload_hidden += o.offload_hidden;
  return *this;
}

WorkTime WorkTime::scaled(double factor) const {
  WorkTime w = *this;
  for (double* part : {&w.gemm, &w.attention, &w.memory, &w.tensor, &w.context, &w.expert, &w.offload,
                       &w.tensor_hidden, &w.context_hidden, &w.expert_hidden, &w.offload_hidden})
    *part *= factor;
  return w;
}

WorkTime StageTime::total() const {
  WorkTime sum = forward;
  sum += input_gradients;
  sum += weight_gradients;
  return sum += recompute;
}

namespace {

// FLOPs of the backward pass of attention for one of the forward pass: five GEMMs for two.
constexpr double kAttentionBackward = 2.5;
// With bulk overlap of tensor parallelism at least this part of a transfer stays visible: the first of its
// slices (comm_overlap.tp_comm_num_splits) has nothing to hide behind.
constexpr double kVisibleSlice = 0.25;
// What stays visible of all-to-alls that another micro-batch's work hides: below 5 % (MCore MoE report).
constexpr double kVisibleExchange = 0.05;
// Ranks of context parallelism send gradients of keys and values in 32 bits, and the keys and values again.
constexpr double kGradientBytes = 4;

// Format of GEMMs that are not in 8 or 4 bits.
GemmFormat high_format(const RunShape& s) {
  return is_low_precision(s.format) ? GemmFormat::bf16 : s.format;
}

using Input = LinearLayer::Input;

// Adds up one micro-batch of one layer.
class LayerClock {
 public:
  LayerClock(const RunShape& shape, const Cluster& cluster)
      : s_(shape),
        c_(cluster),
        t_(real(shape.tp)),
        tokens_(shape.tokens()),
        shard_(shape.sequence_parallel ? tokens_ / t_ : tokens_),
        tp_(group_of(cluster, 1, shape.tp, shape.gpus())),
        cp_(group_of(cluster, shape.tp, shape.cp, shape.gpus())),
        ep_(group_of(cluster, shape.etp, shape.ep, shape.gpus())),
        etp_(group_of(cluster, 1, shape.etp, shape.gpus())) {}

  // low_precision: GEMMs are in the format of the run, else in 16 bits.
  StageTime layer(bool expert_layer, bool low_precision) {
    time_ = {};
    expert_layer_ = expert_layer;
    format_ = low_precision ? s_.format : high_format(s_);
    recomputed(s_.recompute.full, [&] {
      attention();
      if (expert_layer)
        recomputed(s_.recompute.experts, [&] { experts(); });
      else
        recomputed(s_.recompute.mlp, [&] { mlp(); });
      norms();
    });
    return time_;
  }

  // Output layer and loss.
  StageTime head() {
    time_ = {};
    // In 16 bits, as embeddings.
    const GemmFormat format = high_format(s_);
    gemms_in(format, format, !s_.frozen_base(), tokens_, real(s_.vocab) / t_, real(s_.hidden));
    const double logits = tokens_ * real(s_.vocab) / t_;
    move(6 * logits, 6 * logits, 3);
    tensor_exchange(Collective::all_gather, Collective::reduce_scatter, 1, 1, 0);
    return time_;
  }

  StageTime embedding() {
    time_ = {};
    const double bytes = s_.activation_bytes * tokens_ * real(s_.hidden);
    move(2 * bytes / t_, 2 * bytes / t_, 2);
    tensor_exchange(Collective::reduce_scatter, Collective::all_gather, 1, 0, 0);
    return time_;
  }

 private:
  // Adds a part of a layer, whose forward pass the backward pass repeats, or not.
  template <class Part>
  void recomputed(bool again, Part part) {
    const StageTime before = time_;
    part();
    if (!again) return;
    time_.recompute = before.recompute;
    time_.recompute += time_.forward;
    time_.recompute += before.forward.scaled(-1);
  }

  // A linear layer: forward pass, input gradients and weight gradients of [rows, inner] x [inner, columns].
  // input: what the layer reads, by which an adapter is known.
  void gemms(Input input, double rows, double columns, double inner, double count = 1) {
    const bool quantized = is_low_precision(format_);
    gemms_in(format_, quantized && !s_.low_weight_gradients ? high_format(s_) : format_, !s_.frozen_base(),
             rows, columns, inner, count);
    if (quantized) quantized_inputs(rows, columns, inner, count);
    if (s_.frozen_base()) frozen_layer(input, rows, columns, inner, count);
  }

  // Those of experts, `count` of them.
  void grouped_gemms(Input input, double rows, double columns, double inner, double count) {
    const GemmFormat format = format_;
    if (!s_.experts->decodes_codes || !is_low_precision(format))
      return gemms(input, rows, columns, inner, count);
    quantized_inputs(rows, columns, inner, count);
    format_ = high_format(s_);
    gemms(input, rows, columns, inner, count);
    format_ = format;
  }

  // Inputs and gradients of outputs are quantized.
  void quantized_inputs(double rows, double columns, double inner, double count) {
    time_.forward.memory += memory_seconds(c_, s_.quantized_bytes * count * rows * inner);
    time_.input_gradients.memory += memory_seconds(c_, s_.quantized_bytes * count * rows * columns);
  }

  void gemms_in(GemmFormat format, GemmFormat weight_gradients, bool trained, double rows, double columns,
                double inner, double count = 1) {
    time_.forward.gemm += gemm_seconds(c_, format, rows, columns, inner, count);
    time_.input_gradients.gemm += gemm_seconds(c_, format, rows, inner, columns, count);
    if (trained)
      time_.weight_gradients.gemm += gemm_seconds(c_, weight_gradients, inner, columns, rows, count);
  }

  // A frozen linear layer: the two factors of its adapter, the sums with the layer's output and with the
  // gradient of its input, and the layer's weight from 4 bits in each pass.
  void frozen_layer(Input input, double rows, double columns, double inner, double count) {
    if (s_.adapters && saves_input(s_, expert_layer_, input) > 0) {
      // The first factor multiplies the rows that sequence parallelism has not gathered.
      const bool sharded = input == Input::mlp || (input == Input::attention && !s_.latent);
      const double rank = real(s_.adapters->rank), bytes = s_.activation_bytes * count,
                   own = sharded && s_.sequence_parallel ? rows / t_ : rows;
      const GemmFormat format = high_format(s_);
      gemms_in(format, format, true, own, rank, inner, count);
      gemms_in(format, format, true, rows, columns, rank, count);
      move(bytes * rows * columns, 3 * bytes * own * inner, 1);
    }
    if (!s_.frozen_bytes) return;
    const double expanded = (*s_.frozen_bytes + s_.parameter_bytes) * count * columns * inner;
    move(expanded, expanded, 1);
  }

  // Bytes that kernels without a GEMM move in forward and backward pass.
  void move(double forward, double backward, double kernels) {
    time_.forward.memory += memory_seconds(c_, forward, kernels);
    time_.input_gradients.memory += memory_seconds(c_, backward, 1.5 * kernels);
  }

  // Collectives over the tensor-parallel group around two linear layers. again: gathers of saved inputs,
  // which the computation of input gradients hides.
  void tensor_exchange(Collective in, Collective out, double forward, double backward, double again) {
    if (s_.tp == 1) return;
    const double bytes = s_.activation_bytes * tokens_ * real(s_.hidden);
    double one = collective_seconds(c_, tp_, Collective::all_reduce, bytes);
    if (s_.sequence_parallel) {
      one = collective_seconds(c_, tp_, in, bytes) + collective_seconds(c_, tp_, out, bytes);
      const double gathers = again * collective_seconds(c_, tp_, Collective::all_gather, bytes);
      time_.input_gradients.tensor_hidden += gathers;
    }
    const double visible = s_.overlap_tp ? kVisibleSlice : 1;
    time_.forward.tensor += forward * visible * one;
    time_.forward.tensor_hidden += forward * (1 - visible) * one;
    time_.input_gradients.tensor += backward * visible * one;
    time_.input_gradients.tensor_hidden += backward * (1 - visible) * one;
  }

  void linear(const LinearLayer& layer) {
    // Every tensor-parallel rank has the weights of a layer that is not sharded, and multiplies its own rows.
    const double rows = layer.sharding == LinearLayer::Sharding::none ? shard_ : tokens_;
    gemms(layer.input, rows, layer.outputs(s_.tp), layer.inputs(s_.tp));
  }

  void attention() {
    // Latent attention recomputes its up-projections with the scores.
    const auto is_up = [&](const LinearLayer& layer) {
      return s_.latent && layer.sharding == LinearLayer::Sharding::outputs;
    };
    const LinearLayers layers = attention_layers(s_);
    for (const LinearLayer& layer : layers)
      if (!is_up(layer)) linear(layer);
    recomputed(s_.recompute.attention, [&] {
      for (const LinearLayer& layer : layers)
        if (is_up(layer)) linear(layer);
      core_attention();
    });
    tensor_exchange(Collective::all_gather, Collective::reduce_scatter, 1, 1, 1);
  }

  // Scores, softmax and weighted sum, the rotation of queries and keys, and exchanges of keys and values.
  void core_attention() {
    const double flops = 2 * tokens_ / t_ * score_macs(s_) * causal_fraction(s_);
    const double peak = peak_flops(c_, s_.format == GemmFormat::fp32 ? GemmFormat::fp32 : GemmFormat::bf16);
    const double rate = peak * attention_rate(c_, causal_length());
    const double forward = flops / (rate * c_.attention_forward_efficiency),
                 backward = kAttentionBackward * flops / (rate * c_.attention_backward_efficiency);
    time_.forward.attention += forward, time_.input_gradients.attention += backward;
    if (s_.stores_scores) {
      const double scores = tokens_ * real(s_.heads * s_.seq) / t_;
      move(10 * scores, 15 * scores, 4);
    }
    const double rotated = 2 * s_.activation_bytes * tokens_ * real(s_.query_width() + s_.kv_width()) / t_;
    move(rotated, rotated, 1);
    context_exchange(forward, backward);
    add_blocks();
  }

  // Length of a causal sequence whose queries have as many keys, in the mean, as those of one kernel. With
  // keys of other ranks, by a ring or an all-gather, a kernel attends to the tokens of one rank at a time: to
  // its own causally, of others to half of the pairs, in blocks of half of the queries or keys, where a query
  // has half as many again.
  double causal_length() const {
    if (s_.cp == 1 || s_.context_exchange == ContextExchange::all_to_all) return real(s_.seq);
    const double c = real(s_.cp);
    return real(s_.seq) / c * (1.5 - 0.5 / c);
  }

  void context_exchange(double forward, double backward) {
    if (s_.cp == 1) return;
    const double c = real(s_.cp), bytes = s_.activation_bytes * tokens_ / t_;
    const double kv = real(s_.kv_width() + s_.value_width());
    if (s_.context_exchange == ContextExchange::ring) {
      const double one = (c - 1) * transfer_seconds(c_, cp_.crosses_domains(), bytes * kv);
      const auto share = [](double sent, double hides, double& exposed, double& hidden) {
        exposed += std::max(0.0, sent - hides), hidden += std::min(sent, hides);
      };
      share(one, forward, time_.forward.context, time_.forward.context_hidden);
      share((1 + kGradientBytes / s_.activation_bytes) * one, backward, time_.input_gradients.context,
            time_.input_gradients.context_hidden);
      return;
    }
    const bool gather = s_.context_exchange == ContextExchange::all_gather;
    const double one = gather ? collective_seconds(c_, cp_, Collective::all_gather, bytes * kv * c)
                              : collective_seconds(c_, cp_, Collective::all_to_all,
                                                   bytes * (2 * real(s_.query_width()) + kv));
    time_.forward.context += one;
    time_.input_gradients.context += gather ? (1 + kGradientBytes / s_.activation_bytes) * one : one;
  }

  // Outputs, and gradients of queries, keys and values, of the blocks of other ranks are added up in 32 bits.
  void add_blocks() {
    if (s_.cp == 1 || s_.context_exchange == ContextExchange::all_to_all) return;
    const double values = tokens_ / t_, query = real(s_.query_width()), kv = 2 * real(s_.kv_width()),
                 added = real(s_.cp - 1);
    const double rounded = (4 + s_.activation_bytes) * query;
    move(values * (8 * added * query + rounded), values * added * (8 * query + 16 * kv), 2 * added + 1);
  }

  // The dense MLP or the shared experts.
  void mlp() {
    const LinearLayers layers = mlp_layers(s_, expert_layer_);
    for (const LinearLayer& layer : layers) linear(layer);
    activation(s_.activation_bytes * tokens_ * layers.back().inputs(s_.tp));
    tensor_exchange(Collective::all_gather, Collective::reduce_scatter, 1, 1, 1);
  }

  // The activation function on `bytes` of outputs.
  void activation(double bytes) {
    const double inputs = s_.gated ? 2 : 1;
    move((inputs + 1) * bytes, (2 * inputs + 1) * bytes, 1);
  }

  void experts() {
    const ExpertShape& e = *s_.experts;
    const double h = real(s_.hidden);
    // Each token goes to topk experts; the load is balanced. Ranks of expert tensor parallelism share theirs.
    const double sent =
        (s_.etp > 1 && !s_.sequence_parallel ? tokens_ / real(s_.etp) : shard_) * real(e.topk) * e.filled;
    const double slots = sent * real(s_.etp), experts = real(e.count) / real(s_.ep),
                 width = real(e.ffn) / real(s_.etp);
    for (const LinearLayer& layer : routed_layers(s_))
      grouped_gemms(layer.input, slots / experts, layer.outputs(s_.etp), layer.inputs(s_.etp), experts);
    recomputed(s_.recompute.activation, [&] { activation(s_.activation_bytes * slots * width); });
    // Router, and permutation of the tokens to their experts and back; after an all-to-all, whose rows are in
    // the order of their ranks, once more.
    const double rows = s_.activation_bytes * sent * h,
                 sorted = s_.dispatch == TokenDispatch::alltoall && s_.ep > 1 && experts > 1
                              ? 4 * s_.activation_bytes * slots * h
                              : 0,
                 router = 8 * shard_ * real(e.count);
    move(4 * rows + sorted + router, 4 * rows + sorted + router, sorted > 0 ? 10 : 8);
    const StageTime before = time_;
    if (e.shared_ffn > 0) recomputed(s_.recompute.shared, [&] { mlp(); });
    if (s_.dispatch == TokenDispatch::allgather) {
      gather_rows(group_of(c_, 1, s_.ep * s_.etp, s_.gpus()),
                  s_.activation_bytes * shard_ * real(s_.ep * s_.etp) * h,
                  s_.ep > 1 ? &WorkTime::expert : &WorkTime::tensor);
      return;
    }
    exchange_tokens(rows, before);
    gather_rows(etp_, s_.activation_bytes * slots * h, &WorkTime::tensor);
  }

  // The ranks gather rows of tokens and reduce outputs of experts, and the reverse in the backward pass.
  void gather_rows(const Group& ranks, double bytes, double WorkTime::*part) {
    if (ranks.size == 1) return;
    const double one = collective_seconds(c_, ranks, Collective::all_gather, bytes) +
                       collective_seconds(c_, ranks, Collective::reduce_scatter, bytes);
    time_.forward.*part += one, time_.input_gradients.*part += one;
  }

  // Rows to their experts and back: `bytes` of topk copies of each token. Another micro-batch's work hides
  // them (overlap_ep), or that of the shared expert, which has been added since `before_shared`.
  void exchange_tokens(double bytes, const StageTime& before_shared) {
    if (s_.ep == 1) return;
    const ExpertShape& e = *s_.experts;
    const double one = 2 * (s_.dispatch == TokenDispatch::deduplicated
                                ? dispatch_seconds(c_, ep_, bytes / real(e.topk), e.topk, e.group_topk)
                                : collective_seconds(c_, ep_, Collective::all_to_all, bytes));
    const auto add_pass = [&](WorkTime& pass, const WorkTime& before) {
      const double exposed = s_.overlap_ep       ? std::max(kVisibleExchange * one, one - pass.compute())
                             : s_.overlap_shared ? std::max(0.0, one - (pass.compute() - before.compute()))
                                                 : one;
      pass.expert += exposed, pass.expert_hidden += one - exposed;
    };
    add_pass(time_.forward, before_shared.forward);
    add_pass(time_.input_gradients, before_shared.input_gradients);
  }

  // Norms and residual additions.
  void norms() {
    const double rows = s_.activation_bytes * shard_ * real(s_.hidden);
    const double norms = real(s_.norms_per_layer);
    recomputed(s_.recompute.norms, [&] { move(2 * norms * rows, 3 * norms * rows, norms); });
    move(6 * rows, 4 * rows, 2);
  }

  const RunShape& s_;
  const Cluster& c_;
  // Tensor-parallel ranks; tokens of a micro-batch on a rank, and those of its part of the sequence.
  const double t_, tokens_, shard_;
  const Group tp_, cp_, ep_, etp_;
  // Of the layer that is added: whether it has experts, and the format of its GEMMs.
  bool expert_layer_ = false;
  GemmFormat format_ = GemmFormat::bf16;
  StageTime time_;
};

void add(StageTime& sum, const StageTime& one, double count) {
  sum.forward += one.forward.scaled(count);
  sum.input_gradients += one.input_gradients.scaled(count);
  sum.weight_gradients += one.weight_gradients.scaled(count);
  sum.recompute += one.recompute.scaled(count);
}

// Adds the copies of `layers` layers to host memory and back: the computation of another layer hides each.
void add_offload(StageTime& sum, const StageTime& layer, double bytes, const Cluster& c, double layers) {
  const double copy = bytes / (1e9 * c.host_bandwidth);
  const auto add_pass = [&](WorkTime& pass, double hides) {
    pass.offload += layers * std::max(0.0, copy - hides);
    pass.offload_hidden += layers * std::min(copy, hides);
  };
  add_pass(sum.forward, layer.forward.total());
  add_pass(sum.input_gradients, layer.total().total() - layer.forward.total());
}

}  // namespace

std::vector<StageTime> stage_times(const RunShape& s, const Cluster& cluster) {
  LayerClock clock(s, cluster);
  const auto layers_in = [&](bool low_precision) {
    return std::array{clock.layer(false, low_precision),
                      s.experts ? clock.layer(true, low_precision) : StageTime()};
  };
  const std::array low = layers_in(true), high = layers_in(false);
  const StageTime head = clock.head(), embedding = clock.embedding();
  std::vector<StageTime> times;
  int64_t layer = 0;
  for (const StageShape& stage : s.stages) {
    StageTime& time = times.emplace_back();
    for (const int64_t end = layer + stage.layers(); layer < end; ++layer)
      add(time, (s.is_low_precision_layer(layer) ? low : high)[s.is_expert_layer(layer) ? 1 : 0], 1);
    if (s.recompute.full && s.recompute.layers >= 0 && stage.layers() > 0)
      time.recompute = time.recompute.scaled(std::min(1.0, real(s.recompute.layers) / real(stage.layers())));
    const int64_t away = std::min(s.offloaded_layers, stage.layers()),
                  away_dense = std::min(away, stage.dense_layers);
    if (away_dense > 0) add_offload(time, low[0], layer_activations(s, false), cluster, real(away_dense));
    if (away > away_dense)
      add_offload(time, low[1], layer_activations(s, true), cluster, real(away - away_dense));
    if (stage.mtp_layers > 0)
      add(time, (s.format == GemmFormat::fp4 ? high : low)[s.is_expert_layer(s.layers - 1) ? 1 : 0],
          real(stage.mtp_layers));
    if (stage.head) add(time, head, real(1 + s.mtp_layers));
    if (stage.embedding) add(time, embedding, 1);
  }
  return times;
}

}  // namespace capstan::planner

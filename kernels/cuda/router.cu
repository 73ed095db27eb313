// Routing of tokens to experts: a warp for each token. Bytes moved for N tokens and E experts: 4 N E for the
// choice and for the probabilities with pre_softmax, 12 N E for a loss or a backward pass, which read the
// logits again after each sum (from the cache).
#include "kernels/router.hpp"

#include "kernels/common/router.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// Tokens of a block, each with a warp.
constexpr int kRouterWarps = 4;

Grid router_grid(int64_t tokens, size_t shared_bytes = 0) {
  return {ceil_div(tokens, int64_t{kRouterWarps}), kRouterWarps * kWarp, shared_bytes};
}
__device__ int64_t token_of_warp() {
  return block_index() * kRouterWarps + warp_index();
}

__device__ SoftmaxSums softmax_sums(const float* logits, int64_t n) {
  float largest = -INFINITY, sum = 0;
  for (int64_t e = lane_index(); e < n; e += kWarp) largest = Max()(largest, logits[e]);
  largest = warp_reduce(largest, Max());
  for (int64_t e = lane_index(); e < n; e += kWarp) sum += std::exp(logits[e] - largest);
  return {largest, warp_sum(sum)};
}

constexpr uint64_t kNoChoice = ~uint64_t{0};

// The first choice after `previous` among keys [begin, end) of a warp; previous 0: the first of all.
__device__ uint64_t next_choice(const Shared<uint64_t>& keys, int64_t begin, int64_t end, uint64_t previous) {
  uint64_t best = kNoChoice;
  for (int64_t i = begin + lane_index(); i < end; i += kWarp) {
    const uint64_t key = keys[i];
    if (key > previous && key < best) best = key;
  }
  return warp_reduce(best, Min<uint64_t>());
}

// Keeps only the keys of a token, from keys[first] on, that are in the groups with the highest sums of their
// best scores.
__device__ void keep_best_groups(const RouterShape& r, const Shared<uint64_t>& keys, int64_t first) {
  const int64_t size = r.experts / r.groups;
  // Keys of groups lane and lane + kWarp.
  uint64_t of_groups[kMaxGroups / kWarp] = {kNoChoice, kNoChoice};
  for (int64_t g = 0; g < r.groups; ++g) {
    const int64_t begin = first + g * size;
    float sum = 0;
    uint64_t key = 0;
    for (int64_t i = 0; i < r.group_best; ++i) {
      key = next_choice(keys, begin, begin + size, key);
      sum += number_of_key(key);
    }
    if (g % kWarp == lane_index()) of_groups[g / kWarp] = choice_key(sum, g);
  }
  uint64_t kept = 0, previous = 0;
  for (int64_t i = 0; i < r.group_topk; ++i) {
    uint64_t best = kNoChoice;
    for (const uint64_t key : of_groups)
      if (key > previous && key < best) best = key;
    previous = warp_reduce(best, Min<uint64_t>());
    kept |= uint64_t{1} << index_of_choice(previous);
  }
  // All lanes have read the keys.
  sync_warp();
  for (int64_t e = lane_index(); e < r.experts; e += kWarp)
    if ((kept >> (e / size) & 1) == 0) keys[first + e] = kNoChoice;
  sync_warp();
}

__global__ void choose_kernel(RouterShape r, const float* logits, const float* bias, const int32_t* padding,
                              int32_t* experts) {
  CAPSTAN_DYNAMIC_SHARED(uint64_t, keys);
  const int64_t token = token_of_warp(), first = warp_index() * r.experts;
  if (token >= r.tokens) return;
  if (is_padding(padding, token)) {
    for (int64_t k = lane_index(); k < r.topk; k += kWarp) experts[token * r.topk + k] = -1;
    return;
  }
  const float* row = logits + token * r.experts;
  SoftmaxSums sums;
  if (has_softmax_of_all(r)) sums = softmax_sums(row, r.experts);
  for (int64_t e = lane_index(); e < r.experts; e += kWarp) {
    const float score = r.score == RouterScore::sigmoid ? sigmoid(row[e])
                        : has_softmax_of_all(r)         ? softmax_value(row[e], sums)
                                                        : row[e];
    keys[first + e] = choice_key(bias ? score + bias[e] : score, e);
  }
  sync_warp();
  if (r.groups > 1) keep_best_groups(r, keys, first);
  uint64_t key = 0;
  for (int64_t k = 0; k < r.topk; ++k) {
    key = next_choice(keys, first, first + r.experts, key);
    if (lane_index() == 0) experts[token * r.topk + k] = narrow<int32_t>(index_of_choice(key));
  }
}
void choose(Context& c, RouterShape r, In logits, const float* bias, const int32_t* padding,
            int32_t* experts) {
  launch(c, router_grid(r.tokens, sizeof(uint64_t) * static_cast<size_t>(kRouterWarps * r.experts)),
         choose_kernel, r, logits.as<float>(), bias, padding, experts);
}

__device__ ChosenExperts chosen_experts(const RouterShape& r, const float* logits, const int32_t* experts,
                                        int64_t token) {
  ChosenExperts chosen{r, logits + token * r.experts, experts + token * r.topk, {}};
  if (has_softmax_of_all(r)) chosen.sums = softmax_sums(chosen.logits, r.experts);
  chosen.sum_chosen();
  return chosen;
}

__global__ void probabilities_kernel(RouterShape r, const float* logits, const int32_t* experts, float* to) {
  const int64_t token = token_of_warp();
  if (token >= r.tokens) return;
  if (!has_experts(r, experts, token)) {
    for (int64_t k = lane_index(); k < r.topk; k += kWarp) to[token * r.topk + k] = 0;
    return;
  }
  const ChosenExperts chosen = chosen_experts(r, logits, experts, token);
  const float factor = chosen.factor();
  for (int64_t k = lane_index(); k < r.topk; k += kWarp) to[token * r.topk + k] = chosen.score(k) * factor;
}
void probabilities(Context& c, RouterShape r, In logits, const int32_t* experts, float* to) {
  launch(c, router_grid(r.tokens), probabilities_kernel, r, logits.as<float>(), experts, to);
}

__global__ void router_backward_kernel(RouterShape r, const float* logits, const int32_t* experts,
                                       const float* dprobabilities, float* dlogits) {
  const int64_t token = token_of_warp();
  if (token >= r.tokens) return;
  float* to = dlogits + token * r.experts;
  if (!has_experts(r, experts, token)) {
    for (int64_t e = lane_index(); e < r.experts; e += kWarp) to[e] = 0;
    return;
  }
  const ChosenExperts chosen = chosen_experts(r, logits, experts, token);
  const float* d = dprobabilities + token * r.topk;
  const auto gradient = chosen.score_gradient(d);
  const bool all = has_softmax_of_all(r);
  for (int64_t e = lane_index(); e < r.experts; e += kWarp)
    to[e] = all ? -softmax_value(chosen.logits[e], chosen.sums) * gradient.product : 0.0f;
  // The chosen ones are written again.
  sync_warp();
  for (int64_t k = lane_index(); k < r.topk; k += kWarp)
    to[chosen.experts[k]] = chosen.logit_gradient(gradient, d, k);
}
void backward(Context& c, RouterShape r, In logits, const int32_t* experts, const float* dprobabilities,
              float* dlogits) {
  launch(c, router_grid(r.tokens), router_backward_kernel, r, logits.as<float>(), experts, dprobabilities,
         dlogits);
}

// A block for each segment and expert.
__global__ void count_choices_kernel(const int32_t* experts, int64_t tokens, int64_t topk,
                                     TokenSegments segments, int64_t of_experts, float* counts) {
  const int64_t segment = block_index() / of_experts, expert = block_index() % of_experts;
  const SegmentRange range = tokens_of(segments, segment, tokens);
  int32_t sum = 0;
  for (int64_t i = range.begin * topk + thread_index(); i < range.end * topk; i += block_threads())
    sum += experts[i] == expert ? 1 : 0;
  sum = block_sum(sum);
  if (thread_index() == 0) counts[block_index()] = static_cast<float>(sum);
}
void count(Context& c, const int32_t* experts, int64_t tokens, int64_t topk, TokenSegments segments,
           int64_t of_experts, float* counts) {
  launch(c, {segments.count * of_experts, threads_for(tokens * topk, 4)}, count_choices_kernel, experts,
         tokens, topk, segments, of_experts, counts);
}

// ---- losses

// The probabilities of all experts for one token, for load balancing: value(e) * inverse.
struct BalanceProbabilities {
  RouterScore score;
  const float* logits;
  SoftmaxSums sums;
  float inverse;

  __device__ float value(int64_t e) const {
    return score == RouterScore::sigmoid ? sigmoid(logits[e]) : std::exp(logits[e] - sums.largest);
  }
};
__device__ BalanceProbabilities balance_probabilities(const RouterLoss& l, const float* logits) {
  BalanceProbabilities q{l.score, logits, {}, 0};
  if (l.score == RouterScore::sigmoid) {
    float sum = 0;
    for (int64_t e = lane_index(); e < l.experts; e += kWarp) sum += sigmoid(logits[e]);
    q.inverse = 1.0f / (warp_sum(sum) + kRouterEpsilon);
  } else {
    q.sums = softmax_sums(logits, l.experts);
    q.inverse = 1.0f / q.sums.sum;
  }
  return q;
}
__device__ float dot(const BalanceProbabilities& q, const float* counts, int64_t n) {
  float sum = 0;
  for (int64_t e = lane_index(); e < n; e += kWarp) sum += q.value(e) * counts[e];
  return warp_sum(sum) * q.inverse;
}
// 1 / the sum of the counts of a segment.
__device__ float inverse_sum(const float* counts, int64_t n) {
  float sum = 0;
  for (int64_t e = lane_index(); e < n; e += kWarp) sum += counts[e];
  return 1.0f / warp_sum(sum);
}

__global__ void router_loss_kernel(RouterLoss l, const float* logits, const float* counts,
                                   const int32_t* padding, float* values) {
  const int64_t token = token_of_warp();
  if (token >= l.tokens) return;
  const float* row = logits + token * l.experts;
  float value = 0;  // of padding
  if (!is_padding(padding, token) && l.kind == RouterLoss::Kind::z) {
    const float lse = softmax_sums(row, l.experts).log_sum_exp();
    value = lse * lse;
  } else if (!is_padding(padding, token)) {
    const float* own = counts_of(l, counts, token);
    value = dot(balance_probabilities(l, row), own, l.experts) * inverse_sum(own, l.experts);
  }
  if (lane_index() == 0) values[token] = l.factor * value;
}
void loss(Context& c, RouterLoss l, In logits, const float* counts, const int32_t* padding, float* values) {
  launch(c, router_grid(l.tokens), router_loss_kernel, l, logits.as<float>(), counts, padding, values);
}

__global__ void router_loss_backward_kernel(RouterLoss l, const float* logits, const float* counts,
                                            const int32_t* padding, const float* gradient, float* dlogits) {
  const int64_t token = token_of_warp();
  if (token >= l.tokens) return;
  const float* row = logits + token * l.experts;
  float* to = dlogits + token * l.experts;
  const float scale = l.factor * gradient[0];
  if (is_padding(padding, token)) {
    for (int64_t e = lane_index(); e < l.experts; e += kWarp) to[e] = 0;
    return;
  }
  if (l.kind == RouterLoss::Kind::z) {
    const SoftmaxSums sums = softmax_sums(row, l.experts);
    const float factor = 2 * sums.log_sum_exp() * scale;
    for (int64_t e = lane_index(); e < l.experts; e += kWarp) to[e] = softmax_value(row[e], sums) * factor;
    return;
  }
  const BalanceProbabilities q = balance_probabilities(l, row);
  const float* own = counts_of(l, counts, token);
  const float product = dot(q, own, l.experts), by = scale * q.inverse * inverse_sum(own, l.experts);
  for (int64_t e = lane_index(); e < l.experts; e += kWarp) {
    const float value = q.value(e), d = value * by * (own[e] - product);
    to[e] = l.score == RouterScore::sigmoid ? d * (1.0f - value) : d;
  }
}
void loss_backward(Context& c, RouterLoss l, In logits, const float* counts, const int32_t* padding,
                   const float* gradient, float* dlogits) {
  launch(c, router_grid(l.tokens), router_loss_backward_kernel, l, logits.as<float>(), counts, padding,
         gradient, dlogits);
}

// One block.
__global__ void update_bias_kernel(const float* loads, int64_t experts, float rate,
                                   const StepControl* control, float* bias) {
  double sum = 0;
  for (int64_t e = thread_index(); e < experts; e += block_threads()) sum += static_cast<double>(loads[e]);
  sum = block_sum(sum);
  if (control->skip != 0) return;
  for (int64_t e = thread_index(); e < experts; e += block_threads())
    bias[e] = updated_bias(bias[e], loads[e], sum, experts, rate);
}
void update_bias(Context& c, const float* loads, int64_t experts, float rate, In control, float* bias) {
  launch(c, {1, threads_for(experts, 1)}, update_bias_kernel, loads, experts, rate, control.as<StepControl>(),
         bias);
}

}  // namespace

const Router& router_family() {
  static const Router family{.choose = choose,
                             .probabilities = probabilities,
                             .backward = backward,
                             .count = count,
                             .loss = loss,
                             .loss_backward = loss_backward,
                             .update_bias = update_bias};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU

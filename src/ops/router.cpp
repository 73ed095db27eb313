#include "ops/router.hpp"

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

const kernels::Router& router_of(Device& device) {
  return *device.table().router;
}

void check_logits(const char* operation, const Tensor& logits) {
  CAPSTAN_ASSERT(
      logits.rank() == 2 && logits.is_contiguous() &&
          (logits.dtype() == DType::f32 || logits.dtype() == DType::f64),
      std::string(operation) + ": logits " + logits.text() + " are not fp32 or fp64 [tokens, experts]");
  CAPSTAN_ASSERT(logits.size(1) >= 1 && logits.size(1) <= kernels::kMaxExperts,
                 std::string(operation) + ": logits " + logits.text() + " of more than " +
                     std::to_string(kernels::kMaxExperts) + " experts");
}

kernels::RouterShape router_shape(const Tensor& logits, const RouterOptions& o) {
  check_logits("router", logits);
  kernels::RouterShape shape{.tokens = logits.size(0),
                             .experts = logits.size(1),
                             .topk = o.topk,
                             .score = o.score,
                             .pre_softmax = o.pre_softmax,
                             .normalize = o.normalize,
                             .scaling_factor = static_cast<float>(o.scaling_factor)};
  const std::string of = " of " + std::to_string(shape.experts) + " experts";
  int64_t choices = shape.experts;
  if (o.groups > 1) {
    shape.groups = o.groups;
    shape.group_topk = o.group_topk;
    CAPSTAN_ASSERT(
        shape.experts % o.groups == 0 && o.groups <= kernels::kMaxGroups && o.group_topk >= 1 &&
            o.group_topk <= o.groups,
        "router: " + std::to_string(o.group_topk) + " of " + std::to_string(o.groups) + " groups" + of);
    const int64_t size = shape.experts / o.groups;
    shape.group_best = o.group_best > 0 ? o.group_best : std::max<int64_t>(1, o.topk / o.group_topk);
    CAPSTAN_ASSERT(shape.group_best <= size, "router: the best " + std::to_string(shape.group_best) +
                                                 " of a group of " + std::to_string(size) + " experts");
    choices = o.group_topk * size;
  }
  CAPSTAN_ASSERT(o.topk >= 1 && o.topk <= choices,
                 "router: " + std::to_string(o.topk) + " of " + std::to_string(choices) + " choices" + of);
  return shape;
}

void check_padding(const char* operation, const Tensor& padding, int64_t tokens) {
  CAPSTAN_ASSERT(
      !padding.defined() || (padding.elements() == tokens && padding.is_contiguous()),
      std::string(operation) + ": padding " + padding.text() + " for " + std::to_string(tokens) + " tokens");
}

Tensor choose(Tape& tape, const kernels::RouterShape& shape, const Tensor& logits, const Tensor& bias,
              const Tensor& padding) {
  check_padding("router", padding, shape.tokens);
  CAPSTAN_ASSERT(!bias.defined() || bias.elements() == shape.experts,
                 "router: bias " + bias.text() + " for logits " + logits.text());
  Device& device = tape.device();
  Tensor experts = Tensor::empty(device, {shape.tokens, shape.topk}, DType::i32);
  launch(device, router_of(device).choose, shape, logits, bias, padding, experts);
  return experts;
}

void check_segments(const char* operation, const kernels::TokenSegments& s, int64_t tokens) {
  CAPSTAN_ASSERT(s.count >= 1 && s.rows >= 1 && s.first_row >= 0 && s.first_row + tokens <= s.count * s.rows,
                 std::string(operation) + ": " + std::to_string(tokens) + " tokens from row " +
                     std::to_string(s.first_row) + " in " + std::to_string(s.count) + " segments of " +
                     std::to_string(s.rows));
}

// The sum of the values of tokens, fp32 [1].
Var token_loss(Tape& tape, const char* name, const Var& logits, const Tensor& counts, const Tensor& padding,
               const kernels::RouterLoss& loss) {
  check_padding(name, padding, loss.tokens);
  Device& device = tape.device();
  const Tensor values = Tensor::empty(device, {loss.tokens, 1}), sum = Tensor::zeros(device, {1});
  launch(device, router_of(device).loss, loss, logits.value, counts, padding, values);
  add_column_sum(values, sum);
  const auto bytes = static_cast<double>(logits.value.bytes());
  return tape.record({.name = name,
                      .inputs = {logits},
                      .outputs = {sum},
                      .cost = {0, bytes},
                      .backward_cost = {0, 2 * bytes},
                      .saved = {logits.value, counts, padding},
                      .backward = [loss](BackwardContext& ctx) {
                        Device& dev = ctx.device();
                        const Tensor dlogits = Tensor::empty(dev, ctx.saved(0).shape());
                        launch(dev, router_of(dev).loss_backward, loss, ctx.saved(0), ctx.saved(1),
                               ctx.saved(2), ctx.output_gradient(), dlogits);
                        ctx.accumulate_gradient(0, dlogits);
                      }})[0];
}

}  // namespace

Routing route(Tape& tape, const Var& logits, const RouterOptions& options, const Tensor& expert_bias,
              const Tensor& padding) {
  Device& device = tape.device();
  const kernels::RouterShape shape = router_shape(logits.value, options);
  const Tensor experts = tape.choice([&] { return choose(tape, shape, logits.value, expert_bias, padding); });
  const Tensor probabilities = Tensor::empty(device, {shape.tokens, shape.topk});
  launch(device, router_of(device).probabilities, shape, logits.value, experts, probabilities);
  const auto bytes = static_cast<double>(logits.value.bytes());
  Var result = tape.record({.name = "route",
                            .inputs = {logits},
                            .outputs = {probabilities},
                            .cost = {0, 2 * bytes},
                            .backward_cost = {0, 2 * bytes},
                            .saved = {logits.value, experts},
                            .backward = [shape](BackwardContext& ctx) {
                              Device& dev = ctx.device();
                              const Tensor dlogits = Tensor::empty(dev, ctx.saved(0).shape());
                              launch(dev, router_of(dev).backward, shape, ctx.saved(0), ctx.saved(1),
                                     ctx.output_gradient(), dlogits);
                              ctx.accumulate_gradient(0, dlogits);
                            }})[0];
  return {experts, std::move(result)};
}

Tensor choose_experts(Tape& tape, const Tensor& logits, const RouterOptions& options, const Tensor& padding) {
  return choose(tape, router_shape(logits, options), logits, {}, padding);
}

Tensor count_choices(Tape& tape, const Tensor& experts, int64_t of_experts,
                     const kernels::TokenSegments& segments) {
  Device& device = tape.device();
  CAPSTAN_ASSERT(experts.rank() == 2, "count_choices: experts " + experts.text());
  check_segments("count_choices", segments, experts.size(0));
  Tensor counts = Tensor::empty(device, {segments.count, of_experts});
  launch(device, router_of(device).count, experts, experts.size(0), experts.size(1), segments, of_experts,
         counts);
  return counts;
}

Var balance_loss(Tape& tape, const Var& logits, const Tensor& counts, kernels::RouterScore score,
                 const kernels::TokenSegments& segments, double factor, const Tensor& padding) {
  check_logits("balance_loss", logits.value);
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check_segments("balance_loss", segments, tokens);
  CAPSTAN_ASSERT(counts.elements() == segments.count * experts,
                 "balance_loss: counts " + counts.text() + " for logits " + logits.value.text());
  return token_loss(tape, "balance_loss", logits, counts, padding,
                    {.kind = kernels::RouterLoss::Kind::balance,
                     .score = score,
                     .tokens = tokens,
                     .experts = experts,
                     .segments = segments,
                     .factor = static_cast<float>(factor)});
}

Var z_loss(Tape& tape, const Var& logits, double factor, const Tensor& padding) {
  check_logits("z_loss", logits.value);
  return token_loss(tape, "z_loss", logits, {}, padding,
                    {.kind = kernels::RouterLoss::Kind::z,
                     .tokens = logits.size(0),
                     .experts = logits.size(1),
                     .factor = static_cast<float>(factor)});
}

Var attach_loss(Tape& tape, const Var& x, const Var& loss, const Tensor& gradient) {
  CAPSTAN_ASSERT(loss.value.elements() == 1 && (!gradient.defined() || gradient.elements() == 1),
                 "attach_loss: loss " + loss.value.text());
  return tape.record({.name = "attach_loss",
                      .inputs = {x, loss},
                      .outputs = {x.value},
                      .saved = {gradient},
                      .backward = [](BackwardContext& ctx) {
                        Device& device = ctx.device();
                        Tensor start = ctx.saved(0);
                        if (!start.defined()) {
                          start = Tensor::empty(device, {1});
                          launch(device, device.table().elementwise->fill, start, 1.0f, int64_t{1});
                        }
                        ctx.accumulate_gradient(0, std::move(ctx.output_gradient()));
                        ctx.accumulate_gradient(1, std::move(start));
                      }})[0];
}

}  // namespace capstan::ops

// Tiny models against fixtures computed in fp64 by tests/golden/make_model_fixtures.py.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "models/registry.hpp"
#include "support/paths.hpp"
#include "tests/models/tiny.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/fixture.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

constexpr int64_t kBatch = 3, kSeq = 23;

struct Named {
  const char* name;
  config::ModelConfig (*config)();
  double bf16_tolerance = 2e-2, fp16_tolerance = 2.5e-3;
  // Of losses and norms of steps in fp16, after updates have moved the parameters.
  double fp16_steps_tolerance = fp16_tolerance;
};
// Norms of outputs pass rounding on at full size: PyTorch's own bf16 is 3e-2 from fp64 there. The eighth
// token of gemma2 is ill conditioned: in PyTorch, rounding the weights to fp16 moves its logits by up to
// 4e-3. Measured with experts: a gradient of a router 2.4e-2 (olmoe), of the norm of keys 2.1e-2 in bf16 and
// 2.9e-3 in fp16 (qwen3_moe), the norm of all gradients in the third step 3.3e-3 in fp16 (deepseek_moe);
// gpt_oss with AVX2 and SSE4, not with AVX-512: a gradient of the sinks 2.4e-2 in bf16, and the norm of one
// of ten steps 1.3e-2 in fp16 (not traced: near its limit the activation's gradient jumps, as routers do at
// ties); a gradient of the norm of the embedding 2.1e-2 in bf16 (deepseek_mtp).
constexpr Named kModels[] = {
    {"gpt2", tiny_gpt2},
    {"llama", tiny_llama},
    {"llama_variant", tiny_llama_variant},
    {"olmo2", tiny_olmo2, 4e-2, 5e-3},
    {"gemma2", tiny_gemma2, 4e-2, 1e-2},
    {"llama_biases", tiny_llama_biases},
    {"phi3", tiny_phi3},
    {"phi3_long", tiny_phi3_long},
    {"gpt_neox", tiny_gpt_neox},
    {"mixtral", tiny_mixtral},
    {"qwen2_moe", tiny_qwen2_moe},
    {"qwen3_moe", tiny_qwen3_moe, 3e-2, 4e-3},
    {"olmoe", tiny_olmoe, 3e-2},
    {"deepseek", tiny_deepseek},
    {"deepseek_lite", tiny_deepseek_lite},
    {"deepseek_moe", tiny_deepseek_moe, 2e-2, 4e-3},
    {"gpt_oss", tiny_gpt_oss, 3e-2, 2.5e-3, 2e-2},
    {"gpt2_mtp", tiny_gpt2_mtp},
    {"llama_mtp", tiny_llama_mtp},
    {"deepseek_mtp", tiny_deepseek_mtp, 3e-2, 4e-3},
};
config::ModelConfig config_of(const std::string& name) {
  for (const Named& model : kModels)
    if (name == model.name) return model.config();
  FAIL("no model " << name);
  return {};
}

struct Golden {
  std::string name;
  Fixture fixture;
  config::ModelConfig config;
  std::unique_ptr<models::Model> model;

  explicit Golden(const std::string& fixture_name)
      : name(fixture_name),
        fixture(std::string(capstan::test::kSourceDirectory) + "/tests/golden/models/" + fixture_name +
                ".safetensors"),
        config(config_of(fixture_name)),
        model(models::build(config)) {}

  void load(SimpleStore& store) const {
    for (const auto& parameter : model->parameters())
      store.set(*parameter, padded("param." + parameter->name(), *parameter, 0.37f));
  }
  // The fixture has no padding rows: here they hold something that must not matter.
  std::vector<float> padded(const std::string& key, const Parameter& parameter, float padding) const {
    std::vector<float> values = fixture.get<float>(key);
    values.resize(static_cast<size_t>(parameter.spec().shape.elements()), padding);
    return values;
  }
  models::Batch batch(Device& device, int64_t step) const {
    const auto text = fixture.get<int32_t>("text");
    const auto mask = fixture.get<float>("loss_mask");
    std::vector<int32_t> tokens, labels;
    std::vector<float> weights;
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t s = 0; s < kSeq; ++s) {
        const auto at = static_cast<size_t>((step * kBatch + b) * (kSeq + 1) + s);
        tokens.push_back(text[at]);
        labels.push_back(text[at + 1]);
        weights.push_back(mask[static_cast<size_t>((step * kBatch + b) * kSeq + s)]);
      }
    models::Batch b = make_batch(device, kBatch, kSeq, tokens, labels, weights);
    add_later_tokens(device, config, b, tokens, labels, weights);
    return b;
  }
  double tokens_of(int64_t step) const {
    const auto mask = fixture.get<float>("loss_mask");
    double sum = 0;
    for (int64_t i = step * kBatch * kSeq; i < (step + 1) * kBatch * kSeq; ++i)
      sum += mask[static_cast<size_t>(i)];
    return sum;
  }
};

double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}
// Normwise: |a - b| / |b|, and elementwise with the largest |b| as the scale.
struct Difference {
  double normwise, elementwise;
};
Difference difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  std::vector<float> d(a.size());
  double largest = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    d[i] = a[i] - b[i];
    largest = std::max(largest, std::abs(static_cast<double>(d[i])));
    scale = std::max(scale, std::abs(static_cast<double>(b[i])));
  }
  return {norm_of(d) / norm_of(b), largest / scale};
}

// A key bias adds the same to all logits of a query: the softmax does not see it, and its true gradient is
// zero. (With RoPE or QK norm it does matter.) What is computed is rounding noise, so its part of the packed
// bias is left out.
std::vector<float> without_key_bias(const Golden& golden, const std::string& name,
                                    std::vector<float> values) {
  if (!golden.name.starts_with("gpt2") || name.find("linear_qkv.bias") == std::string::npos) return values;
  const auto d = static_cast<size_t>(*golden.config.kv_channels);
  std::vector<float> kept;
  for (size_t i = 0; i < values.size(); ++i)
    if (i / d % 3 != 1) kept.push_back(values[i]);
  return kept;
}

void check_losses_of_mtp(const Golden& golden, const models::Loss& loss, double count, double tolerance) {
  const auto depths = static_cast<size_t>(golden.config.mtp_num_layers.value_or(0));
  REQUIRE(loss.mtp_sums.size() == depths);
  if (depths == 0) return;
  const auto expected = golden.fixture.get<double>("later_losses");
  const double factor = golden.config.mtp_loss_scaling_factor / static_cast<double>(depths);
  for (size_t depth = 0; depth < depths; ++depth)
    CHECK(std::abs(loss.mtp_sums[depth].to_host<double>()[0] / count / factor / expected.at(depth) - 1) <
          tolerance);
}

void check_logits_loss_and_gradients(Device& device, const std::string& name, DType type, double tolerance) {
  CAPTURE(name);
  const Golden golden(name);
  SimpleStore store(device, golden.model->parameters(), type, /*gathered=*/true);
  golden.load(store);
  StepContext context{device, store};
  const models::Batch batch = golden.batch(device, 0);
  {
    Tape tape(context, Tape::Mode::inference);
    const Difference d =
        difference(golden.model->all_logits(tape, batch).to_floats(), golden.fixture.get<float>("logits"));
    MESSAGE(name << " " << name_of(type) << ": logits " << d.normwise << " normwise, " << d.elementwise
                 << " elementwise");
    CHECK(d.normwise < tolerance);
    CHECK(d.elementwise < tolerance);
  }
  Tape tape(context);
  const models::Loss loss = golden.model->forward(tape, batch, {});
  const double count = golden.tokens_of(0), expected = golden.fixture.get<double>("loss").at(0);
  CHECK(std::abs(loss.exact_sum.to_host<double>()[0] / count / expected - 1) < tolerance);
  CHECK(std::abs(loss.sum.value.to_floats()[0] / count / expected - 1) < tolerance);
  CHECK(difference(loss.per_token.to_floats(), golden.fixture.get<float>("token_losses")).normwise <
        tolerance);
  check_losses_of_mtp(golden, loss, count, tolerance);
  tape.backward(gradients_of_losses(device, loss));
  CHECK(store.pins == 0);

  double worst = 0;
  for (const auto& parameter : golden.model->parameters()) {
    CAPTURE(parameter->name());
    if (parameter->spec().buffer) continue;
    std::vector<float> gradient = store.gradient(*parameter).to_floats();
    for (float& g : gradient) g = static_cast<float>(g / count);
    const std::vector<float> truth = golden.padded("grad." + parameter->name(), *parameter, 0.0f);
    const Difference d = difference(without_key_bias(golden, parameter->name(), gradient),
                                    without_key_bias(golden, parameter->name(), truth));
    CHECK(d.normwise < tolerance);
    CHECK(d.elementwise < tolerance);
    worst = std::max({worst, d.normwise, d.elementwise});
    // Padding rows take no part.
    for (size_t i = golden.fixture.get<float>("param." + parameter->name()).size(); i < gradient.size(); ++i)
      REQUIRE(gradient[i] == 0);
  }
  MESSAGE(name << " " << name_of(type) << ": worst gradient " << worst);
}

void check_steps(Device& device, const std::string& name, DType type, double tolerance, int64_t steps) {
  CAPTURE(name);
  const Golden golden(name);
  SimpleStore store(device, golden.model->parameters(), type);
  golden.load(store);
  StepContext context{device, store};
  const auto losses = golden.fixture.get<double>("step_losses"),
             norms = golden.fixture.get<double>("step_grad_norms");
  double worst = 0;
  REQUIRE(losses.size() == 10);
  for (int64_t step = 0; step < steps; ++step) {
    store.begin();
    store.begin_last_micro_batch();
    Tape tape(context);
    const models::Loss loss = golden.model->forward(tape, golden.batch(device, step), {});
    tape.backward(gradients_of_losses(device, loss));
    const double count = golden.tokens_of(step), value = loss.exact_sum.to_host<double>()[0] / count;
    CAPTURE(step);
    CHECK(std::abs(value / losses[static_cast<size_t>(step)] - 1) < tolerance);
    worst = std::max(worst, std::abs(value / losses[static_cast<size_t>(step)] - 1));
    double squares = 0;
    for (const auto& parameter : golden.model->parameters()) {
      const double n = norm_of(store.gradient(*parameter).to_floats()) / count;
      squares += n * n;
    }
    const double norm = std::sqrt(squares);
    CHECK(std::abs(norm / norms[static_cast<size_t>(step)] - 1) < tolerance);
    kernels::AdamStep adam;
    adam.scale.lr = 2e-3f;
    adam.beta1 = 0.9f;
    adam.beta2 = 0.95f;
    adam.eps = 1e-8f;
    adam.bias_correction1 = static_cast<float>(1 - std::pow(0.9, static_cast<double>(step + 1)));
    adam.bias_correction2 = static_cast<float>(1 - std::pow(0.95, static_cast<double>(step + 1)));
    const double clip = std::min(1.0, 1.0 / (norm + 1e-6));
    for (const auto& parameter : golden.model->parameters()) {
      adam.scale.weight_decay = parameter->spec().no_weight_decay ? 0.0f : 0.1f;
      store.adam(*parameter, adam, static_cast<float>(clip / count));
    }
    CHECK(static_cast<int64_t>(store.ready.size()) ==
          std::ranges::count_if(golden.model->parameters(), [](const auto& p) { return !p->spec().buffer; }));
  }
  MESSAGE(name << " " << name_of(type) << ": worst loss of " << steps << " steps " << worst);
}

}  // namespace

TEST_CASE_TEMPLATE("logits, loss and every gradient of tiny models agree with PyTorch", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const Named& model : kModels) {
    if (D::kSlow && kSanitized && &model != kModels) continue;
    check_logits_loss_and_gradients(*device, model.name, DType::f32, 1e-5);
    check_logits_loss_and_gradients(*device, model.name, DType::bf16, model.bf16_tolerance);
    check_logits_loss_and_gradients(*device, model.name, DType::f16, model.fp16_tolerance);
  }
}

TEST_CASE_TEMPLATE("longrope takes its short factors up to the original length", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const Golden golden("phi3_long");
  SimpleStore store(*device, golden.model->parameters(), DType::f32, true);
  golden.load(store);
  StepContext context{*device, store};
  const int64_t seq = golden.config.rope_scaling_original_max_position_embeddings;
  std::vector<int32_t> tokens;
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t s = 0; s < seq; ++s)
      tokens.push_back(golden.fixture.get<int32_t>("text")[static_cast<size_t>(b * (kSeq + 1) + s)]);
  const std::vector<float> weights(tokens.size(), 1.0f);
  Tape tape(context, Tape::Mode::inference);
  const models::Batch batch = make_batch(*device, kBatch, seq, tokens, tokens, weights);
  CHECK(
      difference(golden.model->all_logits(tape, batch).to_floats(), golden.fixture.get<float>("short_logits"))
          .elementwise < 1e-5);
}

TEST_CASE_TEMPLATE("ten AdamW steps give PyTorch's losses", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const Named& model : kModels) {
    if (D::kSlow && kSanitized) return;
    const int64_t steps = D::kSlow || kSanitized ? 2 : 10;
    check_steps(*device, model.name, DType::f32, 1e-5, steps);
    check_steps(*device, model.name, DType::bf16, 2e-2, steps);
    check_steps(*device, model.name, DType::f16, model.fp16_steps_tolerance, steps);
  }
}

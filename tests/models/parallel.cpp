// Models sharded over tensor-parallel ranks and into stages, against the full model on one rank. Runs with
// any number of ranks.
#include <doctest/doctest.h>

#include <map>
#include <string>

#include "comm/reduce.hpp"
#include "models/registry.hpp"
#include "tests/models/tiny.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/simple_store.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

using test::world;

constexpr int64_t kBatch = 2, kSeq = 12;

// Sizes that 2, 3, 4 and 6 ranks divide; the second has fewer groups of heads than ranks.
std::vector<config::ModelConfig> models_for(int ranks) {
  config::ModelConfig gpt = with_head(tiny_gpt2(), 12, 4), llama = with_head(tiny_llama(), 2, 6),
                      variant = with_head(tiny_llama_variant(), 1, 10), padded = gpt,
                      gemma = with_head(tiny_gemma2(), 1, 6), olmo = with_head(tiny_olmo2(), 2, 6),
                      biases = with_head(tiny_llama_biases(), 2, 6), latent = tiny_deepseek(),
                      lite = tiny_deepseek_lite(), sinks = with_head(tiny_sinks(), 2, 6),
                      gpt_mtp = with_mtp(gpt, 2, 0.4), llama_mtp = with_mtp(llama, 1, 0.3),
                      neox = with_head(tiny_gpt_neox(), 12, 6);
  std::vector<config::ModelConfig> models;
  for (config::ModelConfig c :
       {gpt, llama, variant, padded, gemma, olmo, biases, latent, lite, sinks, gpt_mtp, llama_mtp, neox}) {
    c.num_attention_heads = 12;
    c.ffn_hidden_size = 60;
    c.vocab_size = 131;
    c.padded_vocab_size = 144;
    c.init_method_std = 0.2;
    c.embedding_init_method_std = 0.5;
    models.push_back(c);
  }
  for (const size_t i : {1, 5, 6, 9, 11}) models[i].num_query_groups = ranks == 3 ? 3 : 2;
  for (const size_t i : {7, 8}) models[i].num_query_groups = 12;
  // Most ranks hold padding only.
  models[3].padded_vocab_size = 720;
  return models;
}

struct Data {
  std::vector<int32_t> tokens, labels, starts;
  std::vector<float> mask;
  std::vector<int64_t> dropout_rows;
};
Data token_data(uint64_t seed) {
  Data data;
  PhiloxSequence hidden_states(philox_key(seed, purpose::test, 9));
  for (int64_t i = 0; i < kBatch * kSeq; ++i) {
    data.tokens.push_back(static_cast<int32_t>(hidden_states.below(131)));
    data.labels.push_back(static_cast<int32_t>(hidden_states.below(131)));
    data.mask.push_back(hidden_states.below(5) ? 1.0f : 0.0f);
    data.starts.push_back(i % kSeq < 5 ? 0 : 5);
    data.dropout_rows.push_back(static_cast<int64_t>(seed) * 1000 + i);
  }
  return data;
}
models::Batch upload(Device& device, const Data& data) {
  models::Batch b = make_batch(device, kBatch, kSeq, data.tokens, data.labels, data.mask);
  b.dropout_rows = Tensor::from_host<int64_t>(device, {kBatch * kSeq}, data.dropout_rows);
  b.document_start = Tensor::from_host<int32_t>(device, {kBatch * kSeq}, data.starts);
  return b;
}
models::Batch upload(Device& device, const config::ModelConfig& config, const Data& data) {
  models::Batch b = upload(device, data);
  add_later_tokens(device, config, b, data.tokens, data.labels, data.mask);
  return b;
}

using Gradients = std::map<std::string, std::vector<float>>;
struct Step {
  double loss = 0;
  std::vector<float> per_token;
  // Unsharded gradients.
  Gradients gradients;
};

Tensor one(Device& device) {
  return Tensor::from_host<float>(device, {1}, std::vector<float>{1});
}

// One step through stages that lie in this process, one tape each.
Step run(Device& device, const config::ModelConfig& config, DType type, const Data& data,
         const std::vector<models::Stage>& stages, const nn::Parallel& parallel, bool delayed = false) {
  struct Holder {
    std::unique_ptr<models::Model> model;
    std::unique_ptr<SimpleStore> store;
    std::unique_ptr<StepContext> context;
    std::unique_ptr<Tape> tape;
  };
  std::vector<Holder> holders;
  const models::ForwardOptions options{.training = true, .seed = 11};
  Tensor hidden_states;
  std::map<std::string, Tensor> of_losses;
  Step step;
  for (size_t i = 0; i < std::max<size_t>(1, stages.size()); ++i) {
    Holder h;
    models::ModelShard part;
    part.parallel = parallel;
    if (!stages.empty()) part.stages = {stages[i]};
    h.model = models::build(config, part);
    h.store = std::make_unique<SimpleStore>(device, h.model->parameters(), type, true);
    h.store->initialize(h.model->parameters(), 7);
    h.context = std::make_unique<StepContext>(StepContext{device, *h.store});
    h.tape = std::make_unique<Tape>(*h.context);
    const Var input = hidden_states.defined() ? h.tape->input("hidden_states", hidden_states, true) : Var{};
    const auto output = h.model->forward_stage(*h.tape, 0, upload(device, config, data), input, options);
    hidden_states = output.hidden_states.value;
    if (output.loss.exact_sum.defined()) {
      of_losses = gradients_of_losses(device, output.loss);
      step.loss = output.loss.exact_sum.to_host<double>()[0];
      step.per_token = output.loss.per_token.to_floats();
    }
    holders.push_back(std::move(h));
  }
  Tensor gradient;
  for (size_t i = holders.size(); i-- > 0;) {
    Holder& h = holders[i];
    if (gradient.defined())
      h.tape->backward({{"hidden_states", gradient}}, {.delay_weight_gradients = delayed});
    else
      h.tape->backward(of_losses, {.delay_weight_gradients = delayed});
    h.tape->run_weight_gradients();
    if (i > 0) gradient = h.tape->input_gradient("hidden_states");
  }

  // Full gradients from the ranks' shards: sums over the world, which is the tensor group, of what each rank
  // answers for.
  comm::Communicator& group = world().communicator();
  for (const Holder& h : holders)
    for (const auto& p : h.model->parameters()) {
      const std::vector<float> mine = h.store->gradient(*p).to_floats();
      std::vector<double> full(static_cast<size_t>(p->spec().shape.elements()));
      const bool sharded = p->spec().sharding.over(ShardingAxis::tensor) != nullptr;
      const bool counts = parallel.tensor.is_single() || sharded || p->spec().partial_over_tensor ||
                          parallel.tensor.rank() == 0;
      if (counts)
        for_each_element(*p, [&](int64_t local, int64_t global, const ShardSegment&) {
          full[static_cast<size_t>(global)] = static_cast<double>(mine[static_cast<size_t>(local)]);
        });
      if (!parallel.tensor.is_single()) comm::all_reduce(group, full);
      auto& sum = step.gradients[p->name()];
      sum.resize(full.size());
      for (size_t i = 0; i < full.size(); ++i) sum[i] += static_cast<float>(full[i]);  // tied places add up
    }
  return step;
}

double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float v : values) most = std::max(most, std::abs(static_cast<double>(v)));
  return most;
}
void check_equal(const Step& got, const Step& expected, double tolerance) {
  CHECK(got.loss == doctest::Approx(expected.loss).epsilon(tolerance));
  REQUIRE(got.per_token.size() == expected.per_token.size());
  for (size_t i = 0; i < got.per_token.size(); ++i)
    REQUIRE(got.per_token[i] == doctest::Approx(expected.per_token[i]).epsilon(20 * tolerance));
  REQUIRE(got.gradients.size() == expected.gradients.size());
  for (const auto& [name, values] : expected.gradients) {
    CAPTURE(name);
    const auto& other = got.gradients.at(name);
    REQUIRE(other.size() == values.size());
    // A key bias has no gradient but rounding: the softmax does not see it.
    const double scale = std::max(largest(values), 1e-3);
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i)
      worst = std::max(worst, std::abs(static_cast<double>(values[i]) - static_cast<double>(other[i])));
    CHECK(worst / scale < 10 * tolerance);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("layers over tensor-parallel ranks give the loss and gradients of the full model", D,
                   FAST_DEVICES) {
  comm::Communicator& group = world().communicator();
  const auto device = D::make(1);
  const Data data = token_data(4);
  size_t number = 0;
  for (config::ModelConfig c : models_for(group.size())) {
    CAPTURE(number++);
    for (const double dropout : {0.2, 0.0}) {
      if (test::kSanitized && dropout == 0) continue;
      c.hidden_dropout = c.attention_dropout = dropout;
      for (const bool recompute : {false, true}) {
        c.recompute_granularity.reset();
        if (recompute) c.recompute_granularity = config::RecomputeGranularity::full;
        c.recompute_method = config::RecomputeMethod::uniform;
        const Step expected = run(*device, c, DType::f32, data, {}, {});
        for (const bool sequence : {false, true})
          for (const int64_t splits : {1, 3}) {
            const nn::Parallel parallel{{&group, sequence, splits}};
            const Step got = run(*device, c, DType::f32, data, {}, parallel, splits == 3);
            check_equal(got, expected, 2e-6);
            if (test::kSanitized) continue;
            const Step again = run(*device, c, DType::f32, data, {}, parallel, splits == 3);
            CHECK(again.loss == got.loss);
            CHECK((again.gradients == got.gradients));
          }
      }
    }
    const Step narrow = run(*device, c, DType::bf16, data, {}, {});
    check_equal(run(*device, c, DType::bf16, data, {}, {{&group, true, 2}}), narrow, 2e-2);
  }
}

TEST_CASE_TEMPLATE("a model in stages gives the bits of the full model", D, FAST_DEVICES) {
  const auto device = D::make(1);
  const Data data = token_data(5);
  for (config::ModelConfig c : models_for(world().size())) {
    c.num_layers = 3;
    c.hidden_dropout = c.attention_dropout = 0.1;
    // Layers end at the boundary: the same operations as where each layer is recomputed.
    c.recompute_granularity = config::RecomputeGranularity::full;
    c.recompute_method = config::RecomputeMethod::uniform;
    const Step expected = run(*device, c, DType::f32, data, {}, {});
    const int64_t mtp = c.mtp_num_layers.value_or(0);
    for (const auto& stages : std::vector<std::vector<models::Stage>>{
             {{0, 1, true, false}, {1, 2, false, true, mtp}},
             {{0, 0, true, false}, {0, 2, false, false}, {2, 1, false, false}, {3, 0, false, true, mtp}},
             // Multi-token prediction before the stage of the head, also with a stage between them.
             {{0, 2, true, false}, {2, 1, false, false, mtp}, {3, 0, false, true, 0, mtp}},
             {{0, 3, true, false},
              {3, 0, false, false, mtp},
              {3, 0, false, false, 0, mtp},
              {3, 0, false, true, 0, mtp}}}) {
      const Step got = run(*device, c, DType::f32, data, stages, {});
      CHECK(got.loss == expected.loss);
      check_equal(got, expected, 1e-7);
    }
  }
}

TEST_CASE_TEMPLATE("generation over tensor-parallel ranks gives the logits of one", D, EVERY_DEVICE) {
  comm::Communicator& group = world().communicator();
  const auto device = D::make(1);
  for (const config::ModelConfig& c : models_for(group.size())) {
    std::vector<std::vector<float>> logits[2];
    for (const bool sharded : {false, true}) {
      models::ModelShard part;
      if (sharded) part.parallel = {{&group, false, 1}};
      const auto model = models::build(c, part);
      SimpleStore store(*device, model->parameters(), DType::f32, true);
      store.initialize(model->parameters(), 7);
      StepContext context{*device, store};
      models::KvCache cache = model->make_cache(*device, 1, 9);
      for (const std::vector<int32_t>& tokens : {std::vector<int32_t>{3, 99, 130, 5}, {17}, {2}}) {
        Tape tape(context, Tape::Mode::inference);
        const Shape shape{1, static_cast<int64_t>(tokens.size())};
        logits[sharded].push_back(
            model->next_logits(tape, Tensor::from_host<int32_t>(*device, shape, tokens), cache).to_floats());
      }
    }
    for (size_t i = 0; i < logits[0].size(); ++i) {
      REQUIRE(logits[0][i].size() == logits[1][i].size());
      for (size_t j = 0; j < logits[0][i].size(); ++j)
        REQUIRE(logits[1][i][j] == doctest::Approx(logits[0][i][j]).epsilon(1e-4).scale(1));
    }
  }
}

TEST_CASE("transfers start before the kernels that run beside them") {
  comm::Communicator& group = world().communicator();
  if (group.is_single()) return;
  struct Order final : TapeObserver {
    void observe(const TapeEvent& event) override {
      if (event.phase == 'C' || event.phase == 'W' || event.name == "GEMM of a chunk")
        order.push_back(event.phase == 'W' ? "weight gradient" : event.name);
      else if (event.phase == 'F' || event.phase == 'B')
        order.push_back(std::string(1, event.phase) + " " + event.name);
    }
    std::vector<std::string> order;
  } observer;
  const auto device = Cpu::make(1);
  models::ModelShard part;
  part.parallel.tensor = {&group, true, 3};
  const auto model = models::build(models_for(group.size())[1], part);
  SimpleStore store(*device, model->parameters(), DType::f32, true);
  store.initialize(model->parameters(), 7);
  StepContext context{*device, store, &observer};
  {
    Tape tape(context);
    model->forward(tape, upload(*device, token_data(4)), {.training = true, .seed = 11});
    tape.backward({{"loss", one(*device)}});
  }
  using Names = std::vector<std::string>;
  // The last `count` events up to the one called `end`, from `from` on.
  const auto before = [&](const std::string& end, size_t count) {
    const auto at = std::find(observer.order.begin(), observer.order.end(), end);
    REQUIRE(at != observer.order.end());
    return Names(at - static_cast<std::ptrdiff_t>(count), at);
  };
  const std::string start = "start gather of rows", wait = "wait for gather of rows",
                    gemm = "GEMM of a chunk";
  CHECK(before("F column_linear", 9) == Names{start, start, wait, gemm, start, wait, gemm, wait, gemm});
  const std::string sum = "start sum of a chunk", summed = "wait for sum of a chunk";
  CHECK(before("F row_linear", 9) == Names{gemm, sum, gemm, summed, sum, gemm, summed, sum, summed});
  // Backward: the gather of dy overlaps with the GEMM of dx, and so does that of x; the sum of dx with the
  // weight gradient.
  CHECK(before("B row_linear", 10) ==
        Names{start, start, wait, gemm, start, wait, gemm, wait, gemm, "weight gradient"});
  CHECK(before("B column_linear", 12) ==
        Names{start, gemm, sum, gemm, summed, sum, gemm, summed, sum, wait, "weight gradient", summed});
}

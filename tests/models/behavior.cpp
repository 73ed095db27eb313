// Features of models other than the numbers of a plain forward and backward pass: recomputation, dropout,
// documents, generation, tied parameters, planning.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "models/registry.hpp"
#include "tests/models/tiny.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

struct Data {
  std::vector<int32_t> tokens, labels, positions, document_start;
  std::vector<float> mask;
  std::vector<int64_t> dropout_rows;
};
Data random_batch(int64_t rows, uint64_t seed) {
  Data data;
  PhiloxSequence hidden_states(philox_key(seed, purpose::test, 3));
  for (int64_t i = 0; i < rows; ++i) {
    data.tokens.push_back(static_cast<int32_t>(hidden_states.below(131)));
    data.labels.push_back(static_cast<int32_t>(hidden_states.below(131)));
    data.mask.push_back(hidden_states.below(5) ? 1.0f : 0.0f);
    data.dropout_rows.push_back(static_cast<int64_t>(seed * 100000) + i);
  }
  return data;
}
models::Batch upload(Device& device, int64_t batch, int64_t seq, const Data& data) {
  models::Batch b = make_batch(device, batch, seq, data.tokens, data.labels, data.mask);
  b.dropout_rows = Tensor::from_host<int64_t>(device, {batch * seq}, data.dropout_rows);
  if (!data.positions.empty())
    b.positions = Tensor::from_host<int32_t>(device, {batch * seq}, data.positions);
  if (!data.document_start.empty())
    b.document_start = Tensor::from_host<int32_t>(device, {batch * seq}, data.document_start);
  return b;
}
Tensor one(Device& device) {
  return Tensor::from_host<float>(device, {1}, std::vector<float>{1});
}

using Gradients = std::map<std::string, std::vector<float>>;
struct Step {
  double loss = 0;
  std::vector<float> per_token;
  Gradients gradients;
  int64_t peak = 0;
  bool operator==(const Step& o) const {
    return loss == o.loss && per_token == o.per_token && gradients == o.gradients;
  }
};
Step run_step(Device& device, const config::ModelConfig& config, DType type, int64_t batch, int64_t seq,
              const Data& data, models::ForwardOptions options = {}, bool delayed = false) {
  const auto model = models::build(config);
  SimpleStore store(device, model->parameters(), type, true);
  store.initialize(model->parameters(), 7);
  StepContext context{device, store};
  device.reset_peak();
  Step step;
  Tape tape(context);
  models::Batch b = upload(device, batch, seq, data);
  add_later_tokens(device, config, b, data.tokens, data.labels, data.mask);
  const models::Loss loss = model->forward(tape, b, options);
  tape.backward(gradients_of_losses(device, loss), {.delay_weight_gradients = delayed});
  tape.run_weight_gradients();
  step.peak = device.memory().peak;
  step.loss = loss.exact_sum.to_host<double>()[0];
  step.per_token = loss.per_token.to_floats();
  for (const auto& p : model->parameters()) step.gradients[p->name()] = store.gradient(*p).to_floats();
  return step;
}

config::ModelConfig larger_init(config::ModelConfig c) {
  c.init_method_std = 0.2;
  c.embedding_init_method_std = 0.5;
  c.vocab_size = 131;  // of random_batch
  c.padded_vocab_size = 256;
  return c;
}
std::vector<config::ModelConfig> all_models() {
  return {
      larger_init(tiny_gpt2()),         larger_init(tiny_llama()),         larger_init(tiny_llama_variant()),
      larger_init(tiny_llama_biases()), larger_init(tiny_olmo2()),         larger_init(tiny_gemma2()),
      larger_init(tiny_deepseek()),     larger_init(tiny_deepseek_lite()), larger_init(tiny_sinks()),
      larger_init(tiny_off_by_one()),   larger_init(tiny_gpt_neox())};
}
std::vector<config::ModelConfig> models_with_mtp() {
  return {larger_init(tiny_gpt2_mtp()), larger_init(tiny_llama_mtp()), larger_init(tiny_deepseek_mtp())};
}
// With the losses of their routers, which are no sums over tokens.
std::vector<config::ModelConfig> models_with_experts() {
  return {larger_init(tiny_mixtral()), larger_init(tiny_qwen2_moe()), larger_init(tiny_qwen3_moe()),
          larger_init(tiny_deepseek_moe()), larger_init(tiny_gpt_oss())};
}
std::vector<config::ModelConfig> every_model() {
  std::vector<config::ModelConfig> models = all_models();
  for (config::ModelConfig& c : models_with_experts()) models.push_back(std::move(c));
  for (config::ModelConfig& c : models_with_mtp()) models.push_back(std::move(c));
  return models;
}
double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
  return worst;
}

}  // namespace

TEST_CASE_TEMPLATE("recomputation, delayed weight gradients and threads change no bit, dropout included", D,
                   EVERY_DEVICE) {
  const Data data = random_batch(2 * 19, 1);
  for (config::ModelConfig c : every_model())
    for (const DType type : {DType::f32, DType::bf16})
      for (const double dropout : {0.0, 0.2}) {
        if (D::kSlow && (type == DType::f32 || dropout == 0 || test::kSanitized)) continue;
        // The CPU's kernels once more, behind queues.
        const bool few = test::kSanitized && D::type == DeviceType::checked;
        if (few && (type == DType::f32 || dropout == 0)) continue;
        c.num_layers = 3;
        c.hidden_dropout = c.attention_dropout = dropout;
        const auto device = D::make(1), three = D::make(3);
        const models::ForwardOptions options{.training = true, .seed = 11};
        const Step plain = run_step(*device, c, type, 2, 19, data, options);
        CHECK((run_step(*three, c, type, 2, 19, data, options) == plain));
        if (D::type == DeviceType::checked)
          CHECK((run_step(*Cpu::make(2), c, type, 2, 19, data, options) == plain));
        CHECK((run_step(*device, c, type, 2, 19, data, options, true) == plain));
        config::ModelConfig r = c;
        r.recompute_granularity = config::RecomputeGranularity::full;
        for (const auto method : {config::RecomputeMethod::uniform, config::RecomputeMethod::block})
          for (const int64_t layers :
               {int64_t{1}, int64_t{2}, int64_t{3}, std::numeric_limits<int64_t>::max()}) {
            if (D::kSlow && layers != 2) continue;
            r.recompute_method = method;
            r.recompute_num_layers = layers;
            const Step again = run_step(*device, r, type, 2, 19, data, options);
            CHECK((again == plain));
            if (method == config::RecomputeMethod::uniform && layers == 1) CHECK(again.peak < plain.peak);
          }
        CHECK((run_step(*device, r, type, 2, 19, data, {.training = true, .seed = 11, .recompute = false}) ==
               plain));
        config::ModelConfig s = c;
        s.recompute_granularity = config::RecomputeGranularity::selective;
        using Modules = decltype(s.recompute_modules);
        if (c.multi_latent_attention) {
          s.recompute_modules = Modules{config::RecomputeModule::mla_up_proj};
          const Step again = run_step(*device, s, type, 2, 19, data, options);
          CHECK((again == plain));
          CHECK(again.peak < plain.peak);
        }
        // Norms whose outputs are saved, also where they are residuals, and what experts save.
        const auto saves = [&](config::RecomputeModule module) {
          s.recompute_modules = Modules{module};
          const Step again = run_step(*device, s, type, 2, 19, data, options);
          CAPTURE(config::enum_name(module));
          CHECK((again == plain));
          CHECK(again.peak < plain.peak);
        };
        if (c.norm_placement != config::NormPlacement::output) saves(config::RecomputeModule::layernorm);
        if (c.num_moe_experts) saves(config::RecomputeModule::moe_act);
        if (c.moe_shared_expert_intermediate_size) saves(config::RecomputeModule::shared_experts);
        for (const Modules& modules :
             {Modules{config::RecomputeModule::core_attn}, Modules{config::RecomputeModule::mlp},
              Modules{config::RecomputeModule::core_attn, config::RecomputeModule::mlp},
              Modules{config::RecomputeModule::moe, config::RecomputeModule::mlp},
              Modules{config::RecomputeModule::moe, config::RecomputeModule::moe_act}}) {
          if (!c.num_moe_experts && modules.front() == config::RecomputeModule::moe) continue;
          s.recompute_modules = modules;
          CHECK((run_step(*device, s, type, 2, 19, data, options) == plain));
        }
      }
}

TEST_CASE_TEMPLATE("a micro-batch split in two gives the same sums", D, EVERY_DEVICE) {
  const Data data = random_batch(4 * 13, 2);
  for (config::ModelConfig c : all_models()) {
    c.hidden_dropout = c.attention_dropout = 0.1;  // dropout row indices stay with the tokens
    const auto device = D::make(2);
    const models::ForwardOptions options{.training = true, .seed = 3};
    const Step full = run_step(*device, c, DType::f32, 4, 13, data, options);
    Step sum;
    for (const size_t half : {size_t{0}, size_t{1}}) {
      const auto part = [&](const auto& all) {
        return std::decay_t<decltype(all)>(all.begin() + static_cast<int64_t>(half * 26),
                                           all.begin() + static_cast<int64_t>(half * 26 + 26));
      };
      const Data d{part(data.tokens), part(data.labels), {}, {}, part(data.mask), part(data.dropout_rows)};
      const Step step = run_step(*device, c, DType::f32, 2, 13, d, options);
      sum.loss += step.loss;
      for (const auto& [name, values] : step.gradients) {
        auto& total = sum.gradients[name];
        total.resize(values.size());
        for (size_t i = 0; i < values.size(); ++i) total[i] += values[i];
      }
    }
    CHECK(sum.loss == doctest::Approx(full.loss).epsilon(1e-6));
    for (const auto& entry : full.gradients) {
      const std::string& name = entry.first;
      const std::vector<float>& values = entry.second;
      CAPTURE(name);
      double scale = 0;
      for (const float v : values) scale = std::max(scale, std::abs(static_cast<double>(v)));
      CHECK(largest_difference(values, sum.gradients[name]) < 1e-5 * (scale + 1));
    }
  }
}

TEST_CASE_TEMPLATE("dropout: another seed, another mask; none outside training; the mean loss stays near", D,
                   EVERY_DEVICE) {
  config::ModelConfig c = tiny_gpt2();
  const auto device = D::make(2);
  const Data data = random_batch(2 * 19, 4);
  const Step dry = run_step(*device, c, DType::f32, 2, 19, data);
  c.hidden_dropout = c.attention_dropout = 0.1;
  const Step evaluated = run_step(*device, c, DType::f32, 2, 19, data, {.training = false});
  CHECK((evaluated == dry));
  double mean = 0;
  std::set<double> losses;
  for (uint64_t seed = 0; seed < 16; ++seed) {
    const Step step = run_step(*device, c, DType::f32, 2, 19, data, {.training = true, .seed = seed});
    losses.insert(step.loss);
    mean += step.loss / 16;
  }
  CHECK(losses.size() == 16);
  CHECK(mean == doctest::Approx(dry.loss).epsilon(0.02));
}

TEST_CASE_TEMPLATE("documents packed into one sequence equal separate sequences", D, EVERY_DEVICE) {
  const std::vector<int64_t> lengths{5, 1, 9, 4};
  for (const config::ModelConfig& c : all_models()) {
    const auto device = D::make(2);
    Data packed = random_batch(19, 5);
    packed.mask.assign(19, 1.0f);
    Gradients sum;
    std::vector<float> per_token;
    double loss = 0;
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      const auto part = [&](const auto& all) {
        return std::decay_t<decltype(all)>(all.begin() + begin, all.begin() + begin + length);
      };
      const Data d{part(packed.tokens), part(packed.labels),      {}, {},
                   part(packed.mask),   part(packed.dropout_rows)};
      const Step step = run_step(*device, c, DType::f32, 1, length, d);
      loss += step.loss;
      per_token.insert(per_token.end(), step.per_token.begin(), step.per_token.end());
      for (const auto& [name, values] : step.gradients) {
        auto& total = sum[name];
        total.resize(values.size());
        for (size_t i = 0; i < values.size(); ++i) total[i] += values[i];
      }
      for (int64_t i = 0; i < length; ++i) {
        packed.positions.push_back(static_cast<int32_t>(i));
        packed.document_start.push_back(static_cast<int32_t>(begin));
      }
      begin += length;
    }
    const Step step = run_step(*device, c, DType::f32, 1, 19, packed);
    CHECK(step.loss == doctest::Approx(loss).epsilon(1e-6));
    CHECK(largest_difference(step.per_token, per_token) < 2e-5);
    for (const auto& entry : step.gradients) {
      CAPTURE(entry.first);
      CHECK(largest_difference(entry.second, sum[entry.first]) < 1e-4);
    }
  }
}

TEST_CASE_TEMPLATE("generation with a cache gives the logits of the full forward", D, EVERY_DEVICE) {
  for (const config::ModelConfig& c : every_model())
    for (const DType type : {DType::f32, DType::bf16}) {
      // Rounding sends a token that is near a tie of the router to another expert.
      if (c.num_moe_experts && type == DType::bf16) continue;
      const auto device = D::make(2);
      const auto model = models::build(c);
      SimpleStore store(*device, model->parameters(), type, true);
      store.initialize(model->parameters(), 3);
      StepContext context{*device, store};
      const int64_t batch = 2, seq = 21;
      const Data data = random_batch(batch * seq, 6);
      std::vector<float> full;
      {
        Tape tape(context, Tape::Mode::inference);
        full = model->all_logits(tape, upload(*device, batch, seq, data)).to_floats();
      }
      models::KvCache cache = model->make_cache(*device, batch, seq);
      for (const int64_t count : {9, 1, 1, 4, 1, 5}) {  // a prompt, then tokens one by one and a few at once
        std::vector<int32_t> tokens;
        for (int64_t b = 0; b < batch; ++b)
          for (int64_t i = 0; i < count; ++i)
            tokens.push_back(data.tokens[static_cast<size_t>(b * seq + cache.past + i)]);
        Tape tape(context, Tape::Mode::inference);
        const Tensor logits =
            model->next_logits(tape, Tensor::from_host<int32_t>(*device, {batch, count}, tokens), cache);
        CHECK(logits.shape() == Shape{batch, 131});
        const auto values = logits.to_floats();
        for (int64_t b = 0; b < batch; ++b) {
          const auto at = full.begin() + (b * seq + cache.past - 1) * 131;
          const std::vector<float> expected(at, at + 131),
              got(values.begin() + b * 131, values.begin() + b * 131 + 131);
          CHECK(largest_difference(got, expected) < (type == DType::f32 ? 1e-4 : 0.15));
        }
      }
      CHECK(cache.past == seq);
      Tape tape(context, Tape::Mode::inference);
      const Tensor more = Tensor::from_host<int32_t>(*device, {batch, 1}, std::vector<int32_t>{1, 2});
      CHECK_THROWS_AS((void)model->next_logits(tape, more, cache), Error);
    }
  CHECK_THROWS_AS((void)models::build(tiny_gpt2())->make_cache(*D::make(1), 1, 30),
                  Error);  // 29 learned positions
}

TEST_CASE("a generation on every device needs no value of the host from one token to the next") {
  for (const config::ModelConfig& c : {tiny_gpt2(), tiny_llama()}) {
    const auto model = models::build(c);
    const kernels::SamplingOptions sampling{.temperature = 0.8, .top_k = 40, .top_p = 0.95, .seed = 3};
    FirstResults<std::vector<int32_t>> firsts;
    const auto run = [&](Device& device, bool looks) {
      SimpleStore store(device, model->parameters());
      store.initialize(model->parameters(), 3);
      StepContext context{device, store};
      models::KvCache cache = model->make_cache(device, 2, 20);
      Tensor tokens = Tensor::from_host<int32_t>(device, {6}, std::vector<int32_t>{5, 1, 9, 8, 2, 77});
      std::vector<Tensor> drawn;
      const auto idle = [&] { return device.record(Queue::compute)->done(); };
      device.synchronize();
      for (int step = 0; step < 8; ++step) {
        Tape tape(context, Tape::Mode::inference);
        const Tensor logits = model->next_logits(tape, tokens, cache);
        tokens = ops::sample_tokens(logits, 131, sampling, cache.past_on_device);
        if (looks) device.synchronize();
        drawn.push_back(tokens);
      }
      if (device.queues_work() && !looks) CHECK(!idle());
      CHECK(cache.past == 10);
      CHECK(cache.past_on_device.to_host<int32_t>() == std::vector<int32_t>{10});
      std::vector<int32_t> all;
      for (const Tensor& t : drawn)
        for (const int32_t id : t.to_host<int32_t>()) all.push_back(id);
      if (!firsts.of(device)) firsts.of(device) = all;
      CHECK(all == *firsts.of(device));
    };
    on_every_device([&](Device& device) { run(device, true); });
    // No work runs until a wait needs it: all steps are queued before the first one runs.
    run(*make_checked_device(kernels::cpu_table(), 1, {.patient = true}), false);
    const std::vector<int32_t>& ids = *firsts.of(*Cpu::make(1));
    CHECK(std::set<int32_t>(ids.begin(), ids.end()).size() > 2);
  }
}

TEST_CASE_TEMPLATE("longrope: a cache holds to the original length, a new one goes beyond", D, EVERY_DEVICE) {
  const config::ModelConfig c = larger_init(tiny_phi3_long());  // 16 tokens
  const auto device = D::make(1);
  const auto model = models::build(c);
  SimpleStore store(*device, model->parameters(), DType::f32, true);
  store.initialize(model->parameters(), 3);
  StepContext context{*device, store};
  const Data data = random_batch(21, 6);
  const auto next = [&](models::KvCache& cache, int64_t count) {
    const std::vector<int32_t> tokens(data.tokens.begin() + cache.past,
                                      data.tokens.begin() + cache.past + count);
    Tape tape(context, Tape::Mode::inference);
    return model->next_logits(tape, Tensor::from_host<int32_t>(*device, {1, count}, tokens), cache)
        .to_floats();
  };
  const auto last_of = [&](int64_t length) {
    Data part = data;
    part.tokens.resize(static_cast<size_t>(length)), part.labels.resize(static_cast<size_t>(length));
    part.mask.resize(static_cast<size_t>(length)), part.dropout_rows.resize(static_cast<size_t>(length));
    Tape tape(context, Tape::Mode::inference);
    const auto all = model->all_logits(tape, upload(*device, 1, length, part)).to_floats();
    return std::vector<float>(all.end() - c.vocab_size, all.end());
  };
  models::KvCache cache = model->make_cache(*device, 1, 21);
  CHECK(largest_difference(next(cache, 15), last_of(15)) < 1e-4);
  CHECK(largest_difference(next(cache, 1), last_of(16)) < 1e-4);
  CHECK(cache.valid_length == 16);
  CHECK_THROWS_AS((void)next(cache, 1), Error);
  models::KvCache longer = model->make_cache(*device, 1, 21);
  CHECK(largest_difference(next(longer, 17), last_of(17)) < 1e-4);
  CHECK(largest_difference(next(longer, 4), last_of(21)) < 1e-4);
}

TEST_CASE_TEMPLATE(
    "multi-token prediction: its layers train the model, evaluation and generation leave them out", D,
    EVERY_DEVICE) {
  const auto device = D::make(1);
  const Data data = random_batch(2 * 19, 12);
  for (const config::ModelConfig& c : models_with_mtp()) {
    config::ModelConfig without = c;
    without.mtp_num_layers.reset();
    const Step trained = run_step(*device, c, DType::f32, 2, 19, data),
               evaluated = run_step(*device, c, DType::f32, 2, 19, data, {.training = false}),
               plain = run_step(*device, without, DType::f32, 2, 19, data, {.training = false});
    // The loss of the next token is that of the model without.
    CHECK(trained.loss == plain.loss);
    CHECK(evaluated.loss == plain.loss);
    const std::string reached = "decoder.final_layernorm.weight";
    CHECK(evaluated.gradients.at(reached) == plain.gradients.at(reached));
    CHECK(trained.gradients.at(reached) != plain.gradients.at(reached));
    std::set<std::string> layers;
    for (const auto& [name, values] : trained.gradients) {
      if (!name.starts_with("mtp.layers.") || name.ends_with("expert_bias")) continue;
      CAPTURE(name);
      layers.insert(name.substr(0, name.find('.', 11)));
      const std::vector<float> zeros(values.size());
      CHECK(values != zeros);
      CHECK(evaluated.gradients.at(name) == zeros);
    }
    CHECK(std::ssize(layers) == *c.mtp_num_layers);
    const auto model = models::build(c);
    SimpleStore store(*device, model->parameters());
    store.initialize(model->parameters(), 7);
    StepContext context{*device, store};
    models::KvCache cache = model->make_cache(*device, 1, 5);
    CHECK(std::ssize(cache.layers) == c.num_layers);
    Tape tape(context, Tape::Mode::inference);
    const auto tokens = Tensor::from_host<int32_t>(*device, {1, 2}, std::vector<int32_t>{3, 5});
    CHECK(model->next_logits(tape, tokens, cache).elements() == c.vocab_size);
  }
}

TEST_CASE_TEMPLATE("a tied embedding gets the sum of the gradients of its uses", D, EVERY_DEVICE) {
  config::ModelConfig tied = larger_init(tiny_llama()), untied = tied;
  tied.share_embeddings_and_output_weights = true;
  const auto device = D::make(1);
  const Data data = random_batch(19, 8);
  const auto run = [&](const config::ModelConfig& c) {
    const auto model = models::build(c);
    SimpleStore store(*device, model->parameters());
    store.initialize(model->parameters(), 7);
    const auto& first = *model->parameters().front();
    for (const auto& p : model->parameters())
      if (p->name() == "output_layer.weight") store.set(*p, store.main(first).to_floats());
    StepContext context{*device, store};
    store.begin_last_micro_batch();
    Tape tape(context);
    (void)model->forward(tape, upload(*device, 1, 19, data), {});
    tape.backward({{"loss", one(*device)}});
    CHECK(store.ready.size() == model->parameters().size());
    CHECK(store.ready.back() == "embedding.word_embeddings.weight");
    Gradients g;
    for (const auto& p : model->parameters()) g[p->name()] = store.gradient(*p).to_floats();
    return g;
  };
  Gradients a = run(tied), b = run(untied);
  auto& sum = b["embedding.word_embeddings.weight"];
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += b["output_layer.weight"][i];
  CHECK(largest_difference(a["embedding.word_embeddings.weight"], sum) < 1e-4);
}

TEST_CASE_TEMPLATE("frozen parameters get no gradient, and the others the same one", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const Data data = random_batch(19, 9);
  const auto model = models::build(larger_init(tiny_gpt2()));
  const auto run = [&](bool freeze) {
    SimpleStore store(*device, model->parameters());
    store.initialize(model->parameters(), 7);
    for (const auto& p : model->parameters())
      if (freeze && p->name().find("layers.1.mlp") == std::string::npos) store.freeze(*p);
    StepContext context{*device, store};
    Tape tape(context);
    (void)model->forward(tape, upload(*device, 1, 19, data), {});
    tape.backward({{"loss", one(*device)}});
    Gradients g;
    for (const auto& p : model->parameters()) g[p->name()] = store.gradient(*p).to_floats();
    return g;
  };
  const Gradients all = run(false), few = run(true);
  for (const auto& [name, values] : few) {
    if (name.find("layers.1.mlp") != std::string::npos)
      CHECK(values == all.at(name));
    else
      CHECK(values == std::vector<float>(values.size(), 0.0f));
  }
}

TEST_CASE_TEMPLATE(
    "residual variants run: dropout without biases, the residual after the norm, zero-centered gamma", D,
    EVERY_DEVICE) {
  const auto device = D::make(1);
  const Data data = random_batch(19, 10);
  config::ModelConfig c = larger_init(tiny_llama());
  const Step plain = run_step(*device, c, DType::f32, 1, 19, data);
  config::ModelConfig after = c;
  after.apply_residual_connection_post_layernorm = true;
  CHECK(run_step(*device, after, DType::f32, 1, 19, data).loss != plain.loss);
  config::ModelConfig centered = c;
  centered.layernorm_zero_centered_gamma = true;  // gamma begins at 0 and means 1: the same function
  const Step same = run_step(*device, centered, DType::f32, 1, 19, data);
  CHECK(same.loss == plain.loss);
  CHECK(same.gradients == plain.gradients);
  config::ModelConfig skipping = larger_init(tiny_llama_variant());
  const double windowed = run_step(*device, skipping, DType::f32, 1, 19, data).loss;
  skipping.window_attn_skip_freq = 2;
  const double half = run_step(*device, skipping, DType::f32, 1, 19, data).loss;
  skipping.window_attn_skip_freq = 1;
  const double none = run_step(*device, skipping, DType::f32, 1, 19, data).loss;
  skipping.window_size.reset();
  CHECK(none == run_step(*device, skipping, DType::f32, 1, 19, data).loss);
  CHECK(windowed != half);
  // Layers are counted from 1: with n = 2 the first layer keeps its window.
  config::ModelConfig single = larger_init(tiny_llama_variant());
  single.num_layers = 1;
  const double first = run_step(*device, single, DType::f32, 1, 19, data).loss;
  single.window_attn_skip_freq = 2;
  CHECK(first == run_step(*device, single, DType::f32, 1, 19, data).loss);
  CHECK(half != none);
}

TEST_CASE("parameters are listed before anything is allocated") {
  config::ModelConfig c;
  c.num_layers = 12;
  c.hidden_size = 768;
  c.num_attention_heads = 12;
  c.num_query_groups = 12;
  c.kv_channels = 64;
  c.ffn_hidden_size = 3072;
  c.vocab_size = c.padded_vocab_size.emplace(50257);
  c.max_position_embeddings = 1024;
  c.softmax_scale = 0.125;
  c.embedding_init_method_std = 0.02;
  c.add_attention_output_bias = c.add_mlp_bias = true;
  const auto model = models::build(c);
  int64_t elements = 0;
  std::map<std::string, const ParamSpec*> specs;
  for (const auto& p : model->parameters()) {
    elements += p->spec().shape.elements();
    CHECK(p->index() == static_cast<int>(specs.size()));
    specs[p->name()] = &p->spec();
  }
  CHECK(elements == 124439808);  // GPT-2 small
  const ParamSpec& words = *specs.at("embedding.word_embeddings.weight");
  CHECK(words.other_uses == std::vector<std::string>{"output_layer.weight"});
  CHECK(words.sharding.over(ShardingAxis::tensor));
  CHECK(!words.no_weight_decay);
  CHECK(specs.count("output_layer.weight") == 0);
  const ParamSpec& qkv = *specs.at("decoder.layers.11.self_attention.linear_qkv.weight");
  CHECK(qkv.shape == Shape{2304, 768});
  CHECK(qkv.layer == 11);
  CHECK(qkv.block == "layer 11");
  CHECK(qkv.init.std == 0.02);
  const ParamSpec& proj = *specs.at("decoder.layers.3.self_attention.linear_proj.weight");
  CHECK(proj.sharding.over(ShardingAxis::tensor)->dim == 1);
  CHECK(proj.init.std == doctest::Approx(0.02 / std::sqrt(24.0)));
  CHECK(specs.at("decoder.layers.0.mlp.linear_fc2.bias")->sharding.dims().empty());
  CHECK(specs.at("decoder.layers.0.mlp.linear_fc1.bias")->sharding.over(ShardingAxis::tensor));
  CHECK(specs.at("decoder.final_layernorm.weight")->init.kind == Init::Kind::ones);
  CHECK(specs.at("decoder.final_layernorm.bias")->no_weight_decay);

  const auto llama = models::build(tiny_llama());
  for (const auto& p : llama->parameters())
    if (p->name() == "decoder.layers.0.mlp.linear_fc1.weight")
      CHECK(p->spec().sharding.dims()[0].blocks == 2);
}

TEST_CASE("models that cannot be run are refused by name") {
  const auto refusal = [](const config::ModelConfig& c) {
    try {
      (void)models::build(c);
    } catch (const Error& e) {
      return std::string(name_of(e.code())) + ": " + e.message();
    }
    return std::string("built");
  };
  config::ModelConfig c = tiny_llama();
  c.num_moe_experts = 8;
  c.moe_grouped_gemm = false;
  c.fp32_residual_connection = true;
  const std::string both = refusal(c);
  CHECK(both.find("unsupported: ") == 0);
  CHECK(both.find("model.moe_grouped_gemm (a GEMM for each expert)") != std::string::npos);
  CHECK(both.find("model.fp32_residual_connection (an fp32 residual connection)") != std::string::npos);
  c = tiny_llama();
  c.fp32_residual_connection = true;
  CHECK(refusal(c).find("fp32_residual_connection") != std::string::npos);
  c = tiny_llama();
  c.num_query_groups = 4;
  CHECK(refusal(c).find("config: model.num_attention_heads=6") == 0);
  c = tiny_llama();
  c.rotary_percent = 0.4;  // 3 of 8
  CHECK(refusal(c).find("an odd number") != std::string::npos);
}

TEST_CASE("an 8B model's step runs on the meta device in less than 100 ms and says what memory it takes") {
  config::ModelConfig c;
  c.num_layers = 32;
  c.hidden_size = 4096;
  c.ffn_hidden_size = 14336;
  c.num_attention_heads = 32;
  c.num_query_groups = 8;
  c.kv_channels = 128;
  c.softmax_scale = 1 / std::sqrt(128.0);
  c.seq_length = c.max_position_embeddings.emplace(8192);
  c.vocab_size = c.padded_vocab_size.emplace(128256);
  c.position_embedding_type = config::PositionEmbedding::rope;
  c.rotary_base = 500000;
  c.normalization = config::Normalization::rms_norm;
  c.gated_linear_unit = true;
  c.activation_func = config::Activation::silu;
  c.add_bias_linear = false;
  c.add_attention_output_bias = c.add_mlp_bias = false;
  c.share_embeddings_and_output_weights = false;
  c.hidden_dropout = c.attention_dropout = 0;
  c.embedding_init_method_std = c.init_method_std = 0.01;

  struct Count final : TapeObserver {
    double flops = 0;
    void observe(const TapeEvent& event) override { flops += event.cost.flops; }
  };
  const auto run = [&](Count& count, MemoryUse& use) {
    const auto started = std::chrono::steady_clock::now();
    const auto device = make_meta_device(kernels::cpu_table());
    const auto model = models::build(c);
    SimpleStore store(*device, model->parameters(), DType::bf16);
    StepContext context{*device, store, &count};
    models::Batch batch;
    batch.batch = 1;
    batch.seq = 8192;
    {
      CategoryScope scope(MemoryCategory::data);
      batch.tokens = Tensor::empty(*device, {8192}, DType::i32);
      batch.labels = Tensor::empty(*device, {8192}, DType::i32);
      batch.loss_mask = Tensor::empty(*device, {8192});
    }
    Tape tape(context);
    (void)model->forward(tape, batch, {});
    tape.backward({{"loss", Tensor::empty(*device, {1})}});
    use = device->memory();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  Count count;
  MemoryUse use;
  double seconds = run(count, use);
  for (int i = 0; i < 2; ++i) {  // the best of three: other work shares the machine
    count.flops = 0;
    seconds = std::min(seconds, run(count, use));
  }
  MESSAGE("meta step of 8B x 8192: " << seconds * 1e3 << " ms");
#if CAPSTAN_TIMED
  CHECK(seconds < 0.1);
#endif
  const auto at = [&](MemoryCategory category) {
    return static_cast<double>(use.peak_by_category[static_cast<size_t>(category)]);
  };
  // Parameters: bf16 and the fp32 main copy of this store; gradients fp32.
  const double parameters = 8030261248.0;
  CHECK(at(MemoryCategory::parameters) == doctest::Approx(6 * parameters).epsilon(0.01));
  CHECK(at(MemoryCategory::gradients) == doctest::Approx(4 * parameters).epsilon(0.01));
  // Activations kept: 8 h + 4 q + 4 k + 6 f bytes a token and layer, and what is alive at the peak on top.
  const double kept = 8192.0 * 32 * (8 * 4096 + 4 * 4096 + 4 * 1024 + 6 * 14336);
  CHECK(at(MemoryCategory::activations) > kept);
  CHECK(at(MemoryCategory::activations) < 1.1 * kept);
  // 6 FLOPs for each weight of a product and token, and attention over half of the sequence.
  const double weights =
      32.0 * (4096.0 * (4096 + 2048) + 4096.0 * 4096 + 3.0 * 4096 * 14336) + 4096.0 * 128256;
  const double expected = 6 * 8192.0 * (weights + 32.0 * 4096 * 8192);
  CHECK(count.flops == doctest::Approx(expected).epsilon(0.001));
}

TEST_CASE_TEMPLATE("the load of the experts is counted once, and their capacity drops tokens", D,
                   EVERY_DEVICE) {
  const Data data = random_batch(2 * 19, 5);
  for (const bool recomputes : {false, true}) {
    config::ModelConfig c = larger_init(tiny_qwen3_moe());
    if (recomputes) {
      c.recompute_granularity = config::RecomputeGranularity::full;
      c.recompute_num_layers = 1;
    }
    const auto device = D::make(1);
    nn::RouterStatistics statistics(*device, {1, 2}, 6, 1);
    models::ForwardOptions options;
    options.router_statistics = &statistics;
    const Step all = run_step(*device, c, DType::f32, 2, 19, data, options);
    const auto sums = statistics.sums().to_floats();
    for (size_t layer = 0; layer < 2; ++layer) {
      double choices = 0;
      for (size_t e = 0; e < 6; ++e) choices += sums[layer * 9 + e];
      CHECK(choices == 2 * 19 * 3);
      // With an equal load the loss is its coefficient.
      CHECK(sums[layer * 9 + 6] > 0.5f * 0.02f);
      CHECK(sums[layer * 9 + 6] < 6 * 0.02f);
      CHECK(sums[layer * 9 + 7] > 0);
      CHECK(sums[layer * 9 + 8] == 0);
    }
    c.moe_expert_capacity_factor = 3;  // topk * factor is more than the experts: nothing is dropped
    // Each expert drops what exceeds its capacity.
    const auto check_dropped = [&](float capacity) {
      const auto now = statistics.sums().to_floats();
      for (size_t layer = 0; layer < 2; ++layer) {
        float expected = 0;
        for (size_t e = 0; e < 6; ++e) expected += std::max(0.0f, now[layer * 9 + e] - capacity);
        CHECK(now[layer * 9 + 8] == expected);
      }
    };
    const auto step = [&] {
      statistics.clear();
      return run_step(*device, c, DType::f32, 2, 19, data, options);
    };
    CHECK((step() == all));
    check_dropped(2 * 19 * 3);
    c.moe_expert_capacity_factor = 0.3;
    // 2 * 19 tokens, three choices, six experts: 19 each with an equal load.
    const float capacity = std::ceil(19 * 0.3f);
    const Step few = step();
    CHECK(few.per_token != all.per_token);
    check_dropped(capacity);
    c.moe_pad_expert_input_to_capacity = true;
    const Step padded = step();
    CHECK(largest_difference(padded.per_token, few.per_token) < 1e-5);
    check_dropped(capacity);
  }
}

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "nn/initialize.hpp"
#include "nn/mlp.hpp"
#include "nn/param_list.hpp"
#include "nn/rope_table.hpp"
#include "nn/transformer_layer.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;

namespace {

// Returns the table from a new context, so that its rows are copied to the device.
ops::RopeTable rope_rows(nn::RopeTables& tables, Device& device, int64_t positions) {
  test::SimpleStore store(device);
  StepContext context{device, store};
  return tables.in(context, positions);
}
ParamSpec spec_of(const std::string& name, Shape shape, Init init) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = shape;
  spec.init = init;
  return spec;
}
std::vector<float> part_of(const ParamSpec& spec, const Region& part, int threads = 2, uint64_t seed = 5) {
  ThreadPool pool(threads);
  std::vector<float> values(static_cast<size_t>(part.sizes.elements()), -1.0f);
  nn::initialize(spec, seed, part, values, pool);
  return values;
}
}  // namespace

TEST_CASE("initial values depend on seed, name and place only") {
  const ParamSpec spec = spec_of("a.weight", {211, 173}, {Init::Kind::normal, 0.5});
  const std::vector<float> full = part_of(spec, full_region(spec.shape));
  CHECK(full == part_of(spec, full_region(spec.shape), 1));
  CHECK(full != part_of(spec, full_region(spec.shape), 1, 6));
  CHECK(full != part_of(spec_of("b.weight", {211, 173}, spec.init), full_region(spec.shape)));
  for (const Region& region :
       {Region{{3, 0}, {50, 173}}, Region{{0, 7}, {211, 33}}, Region{{210, 172}, {1, 1}},
        Region{{9, 1}, {3, 171}}, Region{{5, 0}, {0, 173}}}) {
    const std::vector<float> values = part_of(spec, region, 3);
    for (int64_t r = 0; r < region.sizes[0]; ++r)
      for (int64_t c = 0; c < region.sizes[1]; ++c)
        REQUIRE(values[static_cast<size_t>(r * region.sizes[1] + c)] ==
                full[static_cast<size_t>((region.offsets[0] + r) * 173 + region.offsets[1] + c)]);
  }
  CHECK_THROWS_AS((void)part_of(spec, {{200, 0}, {12, 173}}), Error);
  CHECK(part_of(spec_of("g", {4}, {Init::Kind::ones}), {{1}, {2}}) == std::vector<float>{1, 1});
  CHECK(part_of(spec_of("g", {4}, {Init::Kind::zeros}), {{1}, {2}}) == std::vector<float>{0, 0});
}

TEST_CASE("initial values of a region of any rank are those of the full tensor") {
  for (const Shape& shape : {Shape{}, Shape{17}, Shape{6, 5, 7}, Shape{3, 4, 2, 5}}) {
    const ParamSpec spec = spec_of("c.weight", shape, {Init::Kind::uniform, 0.5});
    const std::vector<float> full = part_of(spec, full_region(shape));
    std::vector<int64_t> positions(full.size());
    std::iota(positions.begin(), positions.end(), int64_t{0});
    for (size_t d = 0; d <= shape.size(); ++d) {
      Region region = full_region(shape);
      if (d < shape.size()) region.offsets[d] = 1, region.sizes[d] -= 2;
      std::vector<int64_t> expected(static_cast<size_t>(region.sizes.elements()));
      copy_region(region, full_region(shape), std::as_bytes(std::span(positions)).data(), DType::i64, region,
                  std::as_writable_bytes(std::span(expected)).data(), DType::i64);
      const std::vector<float> values = part_of(spec, region, 3);
      for (size_t i = 0; i < values.size(); ++i) REQUIRE(values[i] == full[static_cast<size_t>(expected[i])]);
    }
  }
}

TEST_CASE("initial values are normal with the given deviation") {
  const ParamSpec spec = spec_of("w", {1000, 400}, {Init::Kind::normal, 0.02});
  const auto values = part_of(spec, full_region(spec.shape));
  double sum = 0, squares = 0, fourth = 0;
  int64_t within = 0;
  for (const float v : values) {
    const double z = v / 0.02;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    within += std::abs(z) < 1;
  }
  const auto n = static_cast<double>(values.size());
  CHECK(std::abs(sum / n) < 5 / std::sqrt(n));
  CHECK(squares / n == doctest::Approx(1).epsilon(0.01));
  CHECK(fourth / n == doctest::Approx(3).epsilon(0.03));
  CHECK(static_cast<double>(within) / n == doctest::Approx(0.6827).epsilon(0.005));
}

TEST_CASE("the key of a parameter is the hash of its name: values that must not change between versions") {
  const auto values =
      part_of(spec_of("decoder.layers.0.mlp.linear_fc1.weight", {4, 4}, {Init::Kind::normal, 1.0}),
              full_region({4, 4}), 1, 1234);
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : std::string("decoder.layers.0.mlp.linear_fc1.weight"))
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  for (size_t i = 0; i < 16; ++i)
    CHECK(values[i] == static_cast<float>(normal_at(philox_key(1234, purpose::init, hash), i)));
}

TEST_CASE("rotary frequencies: plain and scaled as in Llama 3.1") {
  nn::RopeOptions options{.rotary_dim = 128, .base = 500000};
  const auto plain = nn::rope_frequencies(options);
  CHECK(plain.size() == 64);
  CHECK(plain[0] == 1);
  CHECK(plain[63] == doctest::Approx(std::pow(500000.0, -126.0 / 128)));
  options.scaling = nn::RopeScaling{};
  const auto scaled = nn::rope_frequencies(options);
  for (size_t i = 0; i < 64; ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    if (wavelength < 2048)
      CHECK(scaled[i] == plain[i]);
    else if (wavelength > 8192)
      CHECK(scaled[i] == doctest::Approx(plain[i] / 8));
    else
      CHECK((scaled[i] < plain[i] && scaled[i] > plain[i] / 8));
    if (i > 0) CHECK(scaled[i] < scaled[i - 1]);
  }
}

TEST_CASE("rotary frequencies: linear, YaRN and LongRoPE, values of Transformers' functions") {
  nn::RopeOptions options{.rotary_dim = 8, .base = 10000};
  using Kind = nn::RopeScaling::Kind;
  nn::RopeScaling& s = options.scaling.emplace();
  const auto check = [&](int64_t positions, const std::vector<double>& expected) {
    const auto got = nn::rope_frequencies(options, positions);
    REQUIRE(got.size() == expected.size());
    for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == doctest::Approx(expected[i]).epsilon(2e-7));
  };
  s.kind = Kind::linear;
  s.factor = 4;
  check(0, {0.25, 0.025, 0.0025, 0.00025});
  s.kind = Kind::yarn;
  s.original_positions = 4096;
  check(0, {1, 0.1, 0.00625, 0.00025});
  s.truncate = false;
  check(0, {1, 0.1, 0.006556971, 0.00025});
  s.kind = Kind::longrope;
  s.short_factors = {1, 1, 1.25, 2};
  s.long_factors = {1, 2, 4, 8};
  check(4096, {1, 0.1, 0.008, 0.0005});
  check(4097, {1, 0.05, 0.0025, 0.000125});
  nn::RopeTables tables(options);
  const auto device = test::Cpu::make(1);
  CHECK(rope_rows(tables, *device, 4096).sin.to_floats()[7] ==
        doctest::Approx(std::sin(0.0005)).epsilon(1e-6));
  CHECK(rope_rows(tables, *device, 4097).sin.to_floats()[7] ==
        doctest::Approx(std::sin(0.000125)).epsilon(1e-6));
  s.attention_factor = 1.5;
  nn::RopeTables tables_with_attention(options);
  CHECK(rope_rows(tables_with_attention, *device, 2).sin.to_floats()[4] ==
        doctest::Approx(1.5 * std::sin(1.0)).epsilon(1e-6));
}

TEST_CASE_TEMPLATE("rotary tables grow and keep their rows", D, EVERY_DEVICE) {
  const auto device = D::make(1);
  nn::RopeTables tables({.rotary_dim = 6, .base = 100});
  const auto small = rope_rows(tables, *device, 3), large = rope_rows(tables, *device, 5);
  CHECK(large.positions() == 5);
  CHECK(large.rotary_dim() == 6);
  const auto a = small.cos.to_floats(), b = large.cos.to_floats(), s = large.sin.to_floats();
  CHECK(std::equal(a.begin(), a.end(), b.begin()));
  CHECK(b[4 * 3 + 1] == static_cast<float>(std::cos(4 * std::pow(100.0, -2.0 / 6))));
  CHECK(s[4 * 3 + 1] == static_cast<float>(std::sin(4 * std::pow(100.0, -2.0 / 6))));
  CHECK(rope_rows(tables, *device, 2).positions() == 2);
}

TEST_CASE_TEMPLATE("a context has rotary tables copied once, and again where it needs more rows", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  test::SimpleStore store(*device);
  StepContext context{*device, store}, other{*device, store};
  nn::RopeOptions options{.rotary_dim = 6, .base = 100};
  options.scaling = nn::RopeScaling{.kind = nn::RopeScaling::Kind::longrope, .original_positions = 6};
  options.scaling->short_factors = {1, 1, 1};
  options.scaling->long_factors = {2, 3, 4};
  nn::RopeTables tables(options), same(options);
  const auto five = tables.in(context, 5), again = tables.in(context, 5), three = tables.in(context, 3);
  CHECK(again.cos.shares_storage_with(five.cos));
  CHECK(three.cos.shares_storage_with(five.cos));
  CHECK(three.positions() == 3);
  CHECK(three.sin.to_floats() == rope_rows(tables, *device, 3).sin.to_floats());
  const auto six = tables.in(context, 6), seven = tables.in(context, 7);
  CHECK(!six.cos.shares_storage_with(five.cos));
  CHECK(tables.in(context, 5).cos.shares_storage_with(six.cos));
  // The long factors have a table of their own.
  CHECK(!seven.cos.shares_storage_with(six.cos));
  CHECK(seven.cos.to_floats() == rope_rows(tables, *device, 7).cos.to_floats());
  CHECK(tables.in(context, 6).cos.shares_storage_with(six.cos));
  CHECK(!same.in(context, 6).cos.shares_storage_with(six.cos));
  CHECK(!tables.in(other, 6).cos.shares_storage_with(six.cos));
}

TEST_CASE("a name is given once") {
  nn::ParamList list;
  const nn::ModulePath place{"decoder.layers.0.mlp", 0, "layer 0"};
  const Parameter& p = list.add(place.inside("linear_fc1").spec("weight", {2, 3}, {}));
  CHECK(p.name() == "decoder.layers.0.mlp.linear_fc1.weight");
  CHECK(p.spec().layer == 0);
  CHECK(!p.spec().no_weight_decay);
  CHECK(list.add(place.inside("linear_fc1").spec("bias", {2}, {})).spec().no_weight_decay);
  CHECK_THROWS_AS(list.add(place.inside("linear_fc1").spec("bias", {2}, {})), Error);
}

TEST_CASE_TEMPLATE("every use of hidden dropout draws a mask of its own", D, EVERY_DEVICE) {
  // All weights are zero and the output biases 1: a layer adds 1/(1-p) for each branch that keeps the
  // element.
  nn::TransformerLayer::Options options;
  options.hidden = 40;
  options.hidden_dropout = 0.25;
  options.attention = [](nn::ParamList& list, const nn::ModulePath& path) {
    nn::Attention::Options o;
    o.hidden = 40, o.heads = o.groups = 2, o.head_dim = 4, o.output_bias = true;
    return std::make_unique<nn::SelfAttention>(list, path, o);
  };
  options.feed_forward = [](nn::ParamList& list, const nn::ModulePath& path) {
    return std::make_unique<nn::Mlp>(list, path, nn::Mlp::Options{.hidden = 40, .ffn = 8, .bias = true});
  };
  nn::ParamList list;
  std::vector<std::unique_ptr<nn::TransformerLayer>> layers;
  for (int i = 0; i < 2; ++i)
    layers.push_back(std::make_unique<nn::TransformerLayer>(
        list, nn::ModulePath{"layers." + std::to_string(i), i, "layer"}, options));
  const auto parameters = list.take();
  const auto device = D::make(1);
  test::SimpleStore store(*device, parameters);
  for (const auto& p : parameters)
    if (p->name().find("proj.bias") != std::string::npos || p->name().find("fc2.bias") != std::string::npos)
      store.set(*p, std::vector<float>(40, 1.0f));
  StepContext context{*device, store};
  const int64_t rows = 50;
  nn::TokenContext tokens;
  tokens.batch = 1;
  tokens.seq = rows;
  tokens.training = true;
  std::vector<int64_t> ids(static_cast<size_t>(rows));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(1000 + i);
  tokens.dropout_rows = tokens.hidden_dropout_rows = Tensor::from_host<int64_t>(*device, {rows}, ids);
  std::vector<std::vector<float>> results;
  for (const auto& layer : layers) {
    Tape tape(context);
    const Var x = tape.input("x", Tensor::zeros(*device, {rows, 40}));
    results.push_back(nn::materialize(tape, layer->forward(tape, {x, {}}, tokens)).value.to_floats());
  }
  CHECK(results[0] != results[1]);
  for (const auto& values : results) {
    double count[3] = {};
    for (const float v : values)
      count[static_cast<int>(std::lround(v * 0.75))] += 1.0 / static_cast<double>(values.size());
    CHECK(count[0] == doctest::Approx(0.0625).epsilon(0.3));
    CHECK(count[1] == doctest::Approx(0.375).epsilon(0.1));
    CHECK(count[2] == doctest::Approx(0.5625).epsilon(0.1));
  }
}

TEST_CASE("the factors of an adapter are sharded as the output of its layer needs, or refused") {
  // Rank 1 of two tensor-parallel ranks.
  const auto group = comm::make_meta_communicator(1, 2, "tp");
  nn::Parallel parallel;
  parallel.tensor = {group.get(), true};
  nn::AdapterOptions adapters;
  adapters.adapts = [](std::string_view) { return true; };
  adapters.rank = 4;
  const nn::ModulePath place{"decoder.layers.0.mlp.linear", 0, "layer 0"};
  nn::Linear::Options options;
  options.in = 8, options.out = 12;
  const auto factors = [&](nn::LinearSharding sharding) {
    nn::ParamList list(parallel, &adapters);
    options.sharding = sharding;
    const nn::Linear linear(list, place, options);
    auto parameters = list.take();
    REQUIRE(parameters.size() == 3);
    parameters.erase(parameters.begin());
    return parameters;
  };
  // Replicated, of the rows of this rank: gradients of both factors are partial.
  const auto replicated = factors(nn::LinearSharding::none);
  CHECK(replicated[0]->shape() == Shape{4, 8});
  CHECK(replicated[1]->shape() == Shape{12, 4});
  CHECK((replicated[0]->spec().partial_over_tensor && replicated[1]->spec().partial_over_tensor));
  // Some of the columns: B has their rows.
  const auto column = factors(nn::LinearSharding::column);
  CHECK(column[0]->shape() == Shape{4, 8});
  CHECK(column[1]->shape() == Shape{6, 4});
  CHECK((column[0]->spec().partial_over_tensor && !column[1]->spec().partial_over_tensor));
  // A partial sum: A reads some of the inputs.
  const auto row = factors(nn::LinearSharding::row);
  CHECK(row[0]->shape() == Shape{4, 4});
  CHECK(row[1]->shape() == Shape{12, 4});
  CHECK((!row[0]->spec().partial_over_tensor && row[1]->spec().partial_over_tensor));

  const auto refused = [&](nn::LinearSharding sharding, const Sharding& of_weight,
                           const std::vector<nn::OutputSlice>& slices) {
    nn::ParamList list(parallel, &adapters);
    ParamSpec spec = place.spec("weight", {12, 8}, {});
    spec.sharding = of_weight;
    const Parameter& weight = list.add(std::move(spec));
    CHECK_THROWS_WITH_AS(nn::Adapter(list, place, weight, sharding, slices),
                         doctest::Contains("is sharded otherwise than the output of `decoder.layers.0.mlp."),
                         Error);
  };
  // A full update for some of the columns, for all of a partial sum, and a partial one for a full output.
  refused(nn::LinearSharding::column, {}, {});
  refused(nn::LinearSharding::row, {}, {});
  refused(nn::LinearSharding::row, {ShardingAxis::expert_tensor, 1}, {});
  adapters.split_fused = true;
  refused(nn::LinearSharding::column, {ShardingAxis::tensor, 0}, {{"linear_q", {1, 0, 12}, 12, {}}});
}

TEST_CASE_TEMPLATE("every adapter draws a mask of its own", D, EVERY_DEVICE) {
  // The weights are zero and both factors the unit matrix: of ones, each adapter makes its mask.
  constexpr int64_t kWidth = 24, kRows = 30;
  for (const bool parts : {false, true}) {
    nn::AdapterOptions adapters;
    adapters.adapts = [](std::string_view) { return true; };
    adapters.rank = kWidth;
    adapters.dropout = 0.25;
    adapters.split_fused = parts;
    nn::ParamList list({}, &adapters);
    std::vector<nn::Linear> linears;
    for (int layer = 0; layer < 2; ++layer) {
      const nn::ModulePath place{"decoder.layers." + std::to_string(layer), layer, "layer"};
      const auto add = [&](const char* sublayer, const char* name, nn::LinearSharding sharding,
                           const std::vector<std::string>& names) {
        nn::Linear::Options options;
        options.in = kWidth;
        options.sharding = sharding;
        const auto count = static_cast<int64_t>(parts ? std::max<size_t>(1, names.size()) : 1);
        options.out = kWidth * count;
        for (const std::string& part : names)
          options.slices.push_back(
              {part, {1, kWidth * static_cast<int64_t>(options.slices.size()), kWidth}, kWidth, {}});
        linears.emplace_back(list, place.inside(sublayer).inside(name), options);
      };
      add("self_attention", "linear_qkv", nn::LinearSharding::column, {"linear_q", "linear_k", "linear_v"});
      add("self_attention", "linear_proj", nn::LinearSharding::row, {});
      add("mlp", "linear_fc1", nn::LinearSharding::column, {"linear_gate", "linear_up"});
      add("mlp", "linear_fc2", nn::LinearSharding::row, {});
    }
    const auto parameters = list.take();
    const auto device = D::make(1);
    test::SimpleStore store(*device, parameters);
    std::vector<float> unit(kWidth * kWidth);
    for (size_t i = 0; i < kWidth; ++i) unit[i * (kWidth + 1)] = 1.0f;
    for (const auto& p : parameters)
      if (p->spec().adapter) store.set(*p, unit);
    StepContext context{*device, store};
    nn::TokenContext tokens;
    tokens.batch = 1;
    tokens.seq = kRows;
    tokens.training = true;
    std::vector<int64_t> ids(static_cast<size_t>(kRows));
    std::iota(ids.begin(), ids.end(), 1000);
    tokens.dropout_rows = tokens.hidden_dropout_rows = Tensor::from_host<int64_t>(*device, {kRows}, ids);
    const std::vector<float> ones(kRows * kWidth, 1.0f);
    std::vector<std::vector<float>> masks;
    for (const nn::Linear& linear : linears) {
      Tape tape(context);
      const Var x = tape.input("x", Tensor::from_host<float>(*device, {kRows, kWidth}, ones));
      const auto y = linear.forward(tape, x, tokens, nn::Linear::Bias::by_caller).value;
      const auto values = y.to_floats();
      const auto columns = static_cast<size_t>(y.shape()[1]);
      for (size_t first = 0; first < columns; first += kWidth) {
        std::vector<float>& mask = masks.emplace_back();
        for (size_t row = 0; row < kRows; ++row)
          mask.insert(mask.end(), values.begin() + static_cast<std::ptrdiff_t>(row * columns + first),
                      values.begin() + static_cast<std::ptrdiff_t>(row * columns + first + kWidth));
        const double dropped =
            static_cast<double>(std::count(mask.begin(), mask.end(), 0.0f)) / (kRows * kWidth);
        CHECK(dropped == doctest::Approx(0.25).epsilon(0.3));
      }
    }
    CHECK(masks.size() == (parts ? 14 : 8));
    for (size_t i = 0; i < masks.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        CAPTURE(i);
        CAPTURE(j);
        CHECK(masks[i] != masks[j]);
      }
  }
}

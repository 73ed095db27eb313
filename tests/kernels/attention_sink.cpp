// Attention with sinks, against a reference whose softmax has a further logit for each head.
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::AttentionShape;
using reference::Complex;
using reference::packed_layout;

namespace {

const kernels::Attention& attention_kernels() {
  return *testing::table().attention;
}
const kernels::AttentionSink& sink_kernels() {
  return *testing::table().attention_sink;
}

// Outputs whose tokens and groups have gaps between them.
kernels::HeadStrides heads_with_gaps(const AttentionShape& a) {
  const int64_t group = a.heads_per_group * a.v_dim + 3;
  return {a.groups * group + 5, group, a.v_dim};
}
// The heads of such outputs, without the gaps.
Vec<double> without_gaps(const AttentionShape& a, const Vec<double>& x) {
  const kernels::HeadStrides strides = heads_with_gaps(a);
  Vec<double> values;
  for (int64_t token = 0; token < a.batch * a.seq; ++token)
    for (int64_t head = 0; head < a.heads(); ++head) {
      const auto at = x.begin() + strides.at(token, head / a.heads_per_group, head % a.heads_per_group);
      values.insert(values.end(), at, at + a.v_dim);
    }
  return values;
}
Vec<double> with_gaps(const AttentionShape& a, const Vec<double>& x, double between) {
  const kernels::HeadStrides strides = heads_with_gaps(a);
  Vec<double> values(static_cast<size_t>(a.batch * a.seq * strides.token), between);
  for (int64_t token = 0; token < a.batch * a.seq; ++token)
    for (int64_t head = 0; head < a.heads(); ++head)
      std::copy_n(x.begin() + (token * a.heads() + head) * a.v_dim, a.v_dim,
                  values.begin() + strides.at(token, head / a.heads_per_group, head % a.heads_per_group));
  return values;
}

// Attention with sinks, forward and backward. no_logits: all logits are 0, without an array of them.
void check_sinks(const AttentionShape& a, DType type, DType logits_type, uint64_t seed, bool no_logits) {
  INFO("groups=", a.groups, " heads/group=", a.heads_per_group, " d=", a.v_dim, " batch=", a.batch,
       " seq=", a.seq, " window=", a.window, " softcap=", a.softcap, " dropout=", a.dropout, " ", text(type),
       " logits in ", text(logits_type), no_logits ? ", none" : "");
  const int64_t tokens = a.batch * a.seq, heads = a.heads(), row = packed_layout(a).row();
  const kernels::HeadStrides strides = heads_with_gaps(a);
  const Array qkv(type, random_values(tokens * row, seed)),
      logits(logits_type, no_logits ? Vec<double>() : random_values(heads, seed + 1, 3)),
      dout(type, with_gaps(a, random_values(tokens * heads * a.v_dim, seed + 2), NAN));
  const auto ids = dropout_rows(tokens);
  const int64_t* dropped = a.dropout > 0 ? ids.data() : nullptr;
  const auto y = run_kernel(
      {Array::zeros(type, tokens * strides.token, 99), Array::zeros(DType::f32, heads * tokens, NAN)},
      [&](kernels::Context& c, Vec<Array>& out) {
        const PackedViews x(qkv, packed_layout(a));
        attention_kernels().forward(c, a, x.q, x.k, x.v, {}, dropped, view_of(out[0], strides), out[1].f32());
        sink_kernels().forward(c, a, logits, view_of(out[0], strides), out[1].f32());
      });
  const Vec<double> values = no_logits ? Vec<double>(static_cast<size_t>(heads)) : logits.rounded();
  Vec<double> lse;
  const auto x = reference::unpacked(a, qkv.rounded());
  const auto expected = reference::attention(a, x, {}, ids, &lse, &values);
  const double bound = tolerance(type) * (type == DType::f32 ? 1 : 2);
  CHECK(error(without_gaps(a, y[0].rounded()), expected) < bound);
  CHECK(error(y[1].rounded(), lse) < 1e-5);
  for (size_t i = 0; i < y[0].rounded().size(); i += static_cast<size_t>(strides.token))
    REQUIRE(y[0].rounded()[i + static_cast<size_t>(strides.token) - 1] == 99);

  const auto g =
      run_kernel({Array::zeros(type, tokens * row, NAN), Array::zeros(DType::f32, heads, 0.5)},
                 [&](kernels::Context& c, Vec<Array>& out) {
                   Array sums = y[1];
                   const PackedViews of(qkv, packed_layout(a));
                   const PackedViews dx(out[0], packed_layout(a));
                   attention_kernels().backward(c, a, of.q, of.k, of.v, view_of(y[0], strides), sums.f32(),
                                                view_of(dout, strides), {}, dropped, dx.q, dx.k, dx.v);
                   sink_kernels().backward(c, a, logits, view_of(y[0], strides), sums.f32(),
                                           view_of(dout, strides), out[1].f32());
                 });
  const auto upstream = without_gaps(a, dout.rounded());
  auto dlogits = reference::complex_step(values, [&](const auto& z) {
    const reference::Qkv<Complex> wide{reference::convert<Complex>(x.q), reference::convert<Complex>(x.k),
                                       reference::convert<Complex>(x.v)};
    return reference::contract(reference::attention<Complex>(a, wide, {}, ids, nullptr, &z), upstream);
  });
  for (double& v : dlogits) v += 0.5;
  CHECK(error(g[1].rounded(), dlogits) < 2 * bound);
  if (tokens * row > 500) return;
  const auto dqkv = reference::complex_step(qkv.rounded(), [&](const auto& z) {
    const auto complex_logits = reference::convert<Complex>(values);
    return reference::contract(
        reference::attention<Complex>(a, reference::unpacked(a, z), {}, ids, nullptr, &complex_logits),
        upstream);
  });
  CHECK(error(g[0].rounded(), dqkv) < 2 * bound);
}

}  // namespace

TEST_CASE("attention sinks: outputs, statistics, and the gradients of queries, keys, values and logits") {
  uint64_t seed = 1;
  for (DType type : kTypes) {
    for (int64_t window : {0, 3})
      for (float dropout : {0.0f, 0.25f}) {
        AttentionShape a = attention_shape(2, 1, 6, 1, 11);
        a.window = window;
        a.dropout = dropout;
        a.softcap = window > 0 ? 1.5f : 0.0f;
        check_sinks(a, type, type, seed++, false);
      }
    check_sinks(attention_shape(1, 2, 5, 2, 9), type, DType::f32, seed++, true);
    // Of many tokens and of wide heads the gradients of the logits alone.
    for (int64_t seq : sizes<int64_t>({1, 65, 100}, {35}))
      for (int64_t d : {8, 33, 64})
        if (runs_case(seed++, 2))
          check_sinks(attention_shape(2, 3, d, 2, seq), type, DType::f32, seed, false);
    check_sinks(attention_shape(1, 2, 250, 1, 7), type, DType::f32, seed++, false);
  }
}

TEST_CASE("attention sinks far above and far below all logits") {
  for (DType type : kTypes) {
    AttentionShape a = attention_shape(2, 2, 8, 1, 5);
    const Array out(type, random_values(a.seq * 4 * 8, 3)), logits(DType::f32, {-3e4, -200, 200, 3e4});
    const auto lse = random_values(4 * a.seq, 4);
    const auto y = run_kernel({out, Array(DType::f32, lse), Array::zeros(DType::f32, 4)},
                              [&](kernels::Context& c, Vec<Array>& o) {
                                const auto heads = contiguous_heads(2, 2, 8);
                                sink_kernels().forward(c, a, logits, view_of(o[0], heads), o[1].f32());
                                sink_kernels().backward(c, a, logits, view_of(o[0], heads), o[1].f32(),
                                                        view_of(out, heads), o[2].f32());
                              });
    Vec<double> expected = out.rounded(), sums;
    for (int64_t token = 0; token < a.seq; ++token) std::fill_n(expected.begin() + token * 32 + 16, 16, 0.0);
    for (size_t i = 0; i < lse.size(); ++i)
      sums.push_back(i < 2 * static_cast<size_t>(a.seq)   ? static_cast<float>(lse[i])
                     : i < 3 * static_cast<size_t>(a.seq) ? 200
                                                          : 3e4);
    CHECK(y[0].rounded() == expected);
    CHECK(y[1].rounded() == sums);
    CHECK(y[2].rounded() == Vec<double>(4));
  }
}

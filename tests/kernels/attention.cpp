#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::AttentionShape;
using kernels::QkvLayout;
using reference::Complex;
using reference::packed_layout;

namespace {
const kernels::Attention& attention() {
  return *testing::table().attention;
}

// The error of weights that are rounded to 16 bits is largest where outputs are the small difference of large
// terms.
double attention_tolerance(DType type) {
  return tolerance(type) * (type != DType::f32 && rounds_attention_weights() ? 2 : 1);
}

// Documents of 1 to 40 tokens, packed.
Vec<int32_t> packed_documents(int64_t batch, int64_t seq, uint64_t seed) {
  PhiloxSequence random(philox_key(seed, purpose::test, 2));
  Vec<int32_t> start;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t first = 0, next = 1 + static_cast<int64_t>(random.below(40));
    for (int64_t i = 0; i < seq; ++i) {
      if (i == next) {
        first = i;
        next = i + 1 + static_cast<int64_t>(random.below(40));
      }
      start.push_back(static_cast<int32_t>(first));
    }
  }
  return start;
}

void check_attention(const AttentionShape& a, DType type, const Vec<int32_t>& documents, uint64_t seed,
                     double scale = 1, bool cumulative = false) {
  INFO("cumulative=", cumulative, " groups=", a.groups, " heads/group=", a.heads_per_group, " d=", a.qk_dim,
       " batch=", a.batch, " seq=", a.seq, " causal=", a.causal, " window=", a.window, " softcap=", a.softcap,
       " dropout=", a.dropout, " packed=", !documents.empty(), " ", text(type));
  const int64_t tokens = a.batch * a.seq, heads = a.heads(), d = a.qk_dim;
  const Array qkv(type, random_values(tokens * packed_layout(a).row(), seed, scale)),
      dout(type, random_values(tokens * heads * d, seed + 1));
  const kernels::HeadStrides outputs = contiguous_heads(a.groups, a.heads_per_group, d);
  const auto ids = dropout_rows(tokens);
  const Vec<int32_t> bounds = document_bounds(documents, a.seq);
  const kernels::Documents packing = packing_of(documents, bounds, cumulative);
  const auto y = run_kernel(
      {Array::zeros(type, tokens * heads * d, NAN), Array::zeros(DType::f32, a.batch * heads * a.seq, NAN)},
      [&](kernels::Context& c, Vec<Array>& out) {
        const PackedViews x(qkv, packed_layout(a));
        attention().forward(c, a, x.q, x.k, x.v, packing, a.dropout > 0 ? ids.data() : nullptr,
                            view_of(out[0], outputs), out[1].f32());
      });
  Vec<double> lse;
  const auto expected = reference::attention(a, qkv.rounded(), documents, ids, &lse);
  CHECK(error(y[0].rounded(), expected) < attention_tolerance(type));
  CHECK(error(y[1].rounded(), lse) < 1e-5);

  const auto g = run_kernel(
      {Array::zeros(type, tokens * packed_layout(a).row(), NAN)}, [&](kernels::Context& c, Vec<Array>& out) {
        Array saved = y[1];
        const PackedViews x(qkv, packed_layout(a));
        const PackedViews dx(out[0], packed_layout(a));
        attention().backward(c, a, x.q, x.k, x.v, view_of(y[0], outputs), saved.f32(), view_of(dout, outputs),
                             packing, a.dropout > 0 ? ids.data() : nullptr, dx.q, dx.k, dx.v);
      });
  const auto gradient = reference::attention_gradient(a, qkv.rounded(), dout.rounded(), documents, ids);
  CHECK(error(g[0].rounded(), gradient) < 2 * attention_tolerance(type));
}
}  // namespace

TEST_CASE("the reference gradient of attention is the derivative of the reference") {
  for (int variant = 0; variant < 4; ++variant) {
    AttentionShape a = attention_shape(2, 2, 3, 2, 7);
    a.softcap = variant == 3 ? 0.7f : 0.0f;
    a.causal = variant != 1;
    a.window = variant == 2 ? 3 : 0;
    a.dropout = variant == 2 ? 0.3f : 0.0f;
    const auto documents = variant == 0 ? packed_documents(2, 7, 3) : Vec<int32_t>{};
    const auto ids = dropout_rows(14);
    const auto qkv = random_values(14 * packed_layout(a).row(), 1), dout = random_values(14 * 4 * 3, 2);
    const auto slow = reference::complex_step(qkv, [&](const auto& z) {
      return reference::contract(reference::attention<Complex>(a, z, documents, ids, nullptr), dout);
    });
    CHECK(error(reference::attention_gradient(a, qkv, dout, documents, ids), slow) < 1e-12);
  }
}

TEST_CASE("attention of odd lengths, head sizes and groups") {
  uint64_t seed = 10;
  for (DType type : kTypes) {
    for (int64_t d : {16, 24, 64, 80, 128})
      check_attention(attention_shape(are_simulated() ? 1 : 2, 2, d, 1, 70), type, {}, seed++);
    for (int64_t d : {96, 160, 250}) check_attention(attention_shape(1, 2, d, 1, 37), type, {}, seed++);
    for (int64_t seq : sizes<int64_t>({1, 2, 17, 63, 64, 65, 130, 200, 257}, {1, 17, 64, 65, 130}))
      check_attention(attention_shape(1, 3, 16, 2, seq), type, {}, seed++);
    for (int64_t groups : {1, 2, 3, 4})
      check_attention(attention_shape(groups, 1, 24, 2, 33), type, {}, seed++);
    check_attention(attention_shape(2, 4, 5, 1, 40), type, {}, seed++);
  }
}

TEST_CASE("attention without causality, with windows, packed documents and dropout") {
  uint64_t seed = 100;
  for (DType type : kTypes)
    for (int64_t seq : sizes<int64_t>({31, 150, 300}, {140, 31})) {
      AttentionShape a = attention_shape(2, are_simulated() ? 1 : 2, 16, 2, seq);
      const auto documents = packed_documents(2, seq, 4);
      const auto check = [&](const Vec<int32_t>& starts) {
        if (runs_case(seed, 3)) check_attention(a, type, starts, seed);
        ++seed;
      };
      check(documents);
      a.dropout = 0.25f;
      a.head_offset = 6;
      check({});
      a.window = 37;
      check({});
      check(documents);
      a.dropout = 0;
      check({});
      a.window = 1;
      check({});
      a.window = 0;
      a.causal = false;
      check({});
      a.dropout = 0.1f;
      check({});
    }
}

TEST_CASE("attention with large logits does not overflow") {
  AttentionShape a = attention_shape(1, 2, 16, 1, 140);
  a.scale = 20;
  check_attention(a, DType::f32, {}, 7, 0.5);
}

TEST_CASE("documents given as cumulative lengths") {
  uint64_t seed = 2300;
  for (DType type : kTypes)
    for (const int64_t seq : sizes<int64_t>({1, 37, 150}, {1, 140})) {
      AttentionShape a = attention_shape(2, are_simulated() ? 1 : 2, 24, 3, seq);
      check_attention(a, type, packed_documents(3, seq, 6), seed++, 1, true);
      a.window = 21;
      check_attention(a, type, packed_documents(3, seq, 7), seed++, 1, true);
    }
}

TEST_CASE("capped logits: masks, documents, dropout, caps that bind and caps that do not") {
  uint64_t seed = 500;
  for (DType type : kTypes)
    for (const auto [seq, d] : {std::array<int64_t, 2>{5, 5}, {65, 16}, {150, 24}})
      for (const float cap : {0.6f, 50.0f}) {
        AttentionShape a = attention_shape(2, are_simulated() ? 1 : 2, d, 2, seq);
        const auto check = [&](const Vec<int32_t>& starts) {
          if (runs_case(seed, 3)) check_attention(a, type, starts, seed);
          ++seed;
        };
        a.softcap = cap;
        check({});
        a.window = 13;
        check(packed_documents(2, seq, 4));
        a.window = 0;
        a.dropout = 0.2f;
        check({});
        a.dropout = 0;
        a.causal = false;
        check({});
      }
  AttentionShape a = attention_shape(1, 2, 16, 1, 140);
  // Nearly all logits reach the cap.
  a.scale = 20;
  a.softcap = 30;
  check_attention(a, DType::f32, {}, 7, 0.5);
}

TEST_CASE("queries that attend to no key give zero and no gradient") {
  AttentionShape a = attention_shape(1, 2, 16, 1, 70);
  Vec<int32_t> documents(70, 0);
  for (size_t i = 20; i < 30; ++i) documents[i] = 1000;  // "starts later than this token": no key is left
  check_attention(a, DType::f32, documents, 8);
}

TEST_CASE("infinite and largest values give infinite and large outputs to all queries") {
  AttentionShape a = attention_shape(1, 2, 16, 1, 70);
  a.causal = false;
  const QkvLayout layout = packed_layout(a);
  Vec<double> values = random_values(a.seq * layout.row(), 9);
  const auto value_at = [&](int64_t token, int64_t column) -> double& {
    return values[static_cast<size_t>(token * layout.row() + layout.value(0) + column)];
  };
  value_at(20, 5) = INFINITY;
  value_at(33, 6) = -INFINITY;
  value_at(40, 7) = 3.4e38;
  const Array qkv(DType::f32, values);
  const auto y =
      run_kernel({Array::zeros(DType::f32, a.seq * a.heads() * a.v_dim, NAN),
                  Array::zeros(DType::f32, a.heads() * a.seq, NAN)},
                 [&](kernels::Context& c, Vec<Array>& out) {
                   const PackedViews x(qkv, layout);
                   attention().forward(
                       c, a, x.q, x.k, x.v, {}, nullptr,
                       view_of(out[0], contiguous_heads(a.groups, a.heads_per_group, a.v_dim)), out[1].f32());
                 });
  check_extreme(y[0].rounded(), reference::attention(a, qkv.rounded(), {}, dropout_rows(a.seq), nullptr),
                1e-5);
}

// The same attention in 16 bits and in fp32 on its widened inputs: only rounding may be between them.
void check_narrow(DType half, const AttentionShape& a, const Vec<int32_t>& documents, uint64_t seed) {
  INFO("groups=", a.groups, " heads/group=", a.heads_per_group, " d=", a.qk_dim, " batch=", a.batch,
       " seq=", a.seq, " causal=", a.causal, " window=", a.window, " softcap=", a.softcap,
       " dropout=", a.dropout, " packed=", !documents.empty());
  const int64_t tokens = a.batch * a.seq, heads = a.heads(), d = a.qk_dim;
  const Array qkv(half, random_values(tokens * packed_layout(a).row(), seed)),
      dout(half, random_values(tokens * heads * d, seed + 1));
  const auto ids = dropout_rows(tokens);
  const int32_t* document_start = documents.empty() ? nullptr : documents.data();
  const int64_t* dropout_rows = a.dropout > 0 ? ids.data() : nullptr;
  const kernels::HeadStrides outputs = contiguous_heads(a.groups, a.heads_per_group, d);
  const auto forward = [&](DType type) {
    const Array x(type, qkv.rounded());
    return run_kernel(
        {Array::zeros(type, tokens * heads * d, NAN), Array::zeros(DType::f32, a.batch * heads * a.seq, NAN)},
        [&](kernels::Context& c, Vec<Array>& o) {
          const PackedViews in(x, packed_layout(a));
          attention().forward(c, a, in.q, in.k, in.v, {.start = document_start}, dropout_rows,
                              view_of(o[0], outputs), o[1].f32());
        });
  };
  const auto narrow = forward(half), wide = forward(DType::f32);
  // Half a step of bf16 and the rest of P, or half a step of each of its values; fp16 has eight times as many
  // steps.
  const double step = half == DType::bf16 ? 0.004 : 0.0005,
               allowed = step * (rounds_attention_weights() ? 4 : 1);
  CHECK(error(narrow[0].rounded(), wide[0].rounded()) < allowed);
  CHECK(error(narrow[1].rounded(), wide[1].rounded()) < 2e-6);
  const auto backward = [&](DType type) {
    const Array x(type, qkv.rounded()), y(type, narrow[0].rounded()), dy(type, dout.rounded());
    Array lse = wide[1];
    return run_kernel({Array::zeros(type, tokens * packed_layout(a).row(), NAN)},
                      [&](kernels::Context& c, Vec<Array>& o) {
                        const PackedViews in(x, packed_layout(a));
                        const PackedViews dx(o[0], packed_layout(a));
                        attention().backward(c, a, in.q, in.k, in.v, view_of(y, outputs), lse.f32(),
                                             view_of(dy, outputs), {.start = document_start}, dropout_rows,
                                             dx.q, dx.k, dx.v);
                      })[0]
        .rounded();
  };
  // The largest of many errors grows with their number; their mean square does not.
  const auto got = backward(half), expected = backward(DType::f32);
  CHECK(error(got, expected) < 3.2 * allowed);
  CHECK(rms_error(got, expected) < step);
}

TEST_CASE("attention in 16 bits is fp32 attention of the widened inputs but for rounding") {
  uint64_t seed = 900;
  for (const DType half : {DType::bf16, DType::f16})
    for (const auto [seq, d] : {std::array<int64_t, 2>{1, 1},
                                {7, 3},
                                {31, 33},
                                {33, 31},
                                {65, 40},
                                {129, 64},
                                {193, 72},
                                {259, 96}}) {
      if (are_simulated() && seq > 150) break;
      AttentionShape a = attention_shape(are_simulated() ? 1 : 2, 3, d, are_simulated() ? 1 : 2, seq);
      const auto check = [&](const Vec<int32_t>& starts) {
        if (runs_case(seed, 4)) check_narrow(half, a, starts, seed);
        ++seed;
      };
      check({});
      check(packed_documents(2, seq, 4));
      a.dropout = 0.2f;
      a.window = 43;
      check({});
      a.softcap = 0.7f;
      check(packed_documents(2, seq, 5));
      a.window = 0;
      a.causal = false;
      check({});
    }
}

TEST_CASE("dropout drops the same pairs in every type") {
  AttentionShape a = attention_shape(2, 2, 150, 1, 150);
  a.dropout = 0.4f;
  auto values = random_values(a.seq * packed_layout(a).row(), 77);
  for (int64_t t = 0; t < a.seq; ++t)  // value of key t: one at t, so that outputs are the weights
    for (int64_t g = 0; g < 2; ++g)
      for (int64_t i = 0; i < 150; ++i)
        values[static_cast<size_t>(t * packed_layout(a).row() + packed_layout(a).value(g) + i)] =
            i == t ? 1 : 0;
  const auto ids = dropout_rows(a.seq);
  Vec<bool> kept[3];
  for (size_t type = 0; type < 3; ++type) {
    const Array qkv(kTypes[type], values);
    const auto y =
        run_kernel({Array::zeros(kTypes[type], a.seq * 4 * 150), Array::zeros(DType::f32, a.seq * 4)},
                   [&](kernels::Context& c, Vec<Array>& o) {
                     const PackedViews x(qkv, packed_layout(a));
                     attention().forward(c, a, x.q, x.k, x.v, {}, ids.data(),
                                         view_of(o[0], contiguous_heads(2, 2, 150)), o[1].f32());
                   });
    for (const double p : y[0].rounded()) kept[type].push_back(p > 0);
  }
  CHECK(kept[0] == kept[1]);
  CHECK(kept[0] == kept[2]);
  const auto share =
      static_cast<double>(std::count(kept[0].begin(), kept[0].end(), true)) / (4 * 150 * 151 / 2);
  CHECK(share == doctest::Approx(0.6).epsilon(0.03));
}

TEST_CASE("generation with a cache continues as the full sequence would") {
  for (DType type : kTypes)
    for (const auto [past, now] :
         {std::array<int64_t, 2>{0, 1}, {0, 9}, {1, 1}, {63, 1}, {64, 2}, {100, 70}, {200, 1}})
      for (int64_t window : {0, 5, 17}) {
        AttentionShape full = attention_shape(2, 2, 24, 2, past + now);
        full.window = window;
        full.softcap = window == 17 ? 1.5f : 0.0f;
        const int64_t batch = 2, capacity = past + now + 3, d = 24, row = packed_layout(full).row(),
                      width = full.heads() * d;
        const Array all(type, random_values(batch * full.seq * row, 21));
        const auto values = all.rounded();
        Vec<double> k(static_cast<size_t>(batch * 2 * capacity * d), 3.0), v = k, fresh;
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t g = 0; g < 2; ++g)
            for (int64_t t = 0; t < past; ++t)
              for (int64_t i = 0; i < d; ++i) {
                const auto to = static_cast<size_t>(((b * 2 + g) * capacity + t) * d + i);
                k[to] =
                    values[static_cast<size_t>((b * full.seq + t) * row + packed_layout(full).key(g) + i)];
                v[to] =
                    values[static_cast<size_t>((b * full.seq + t) * row + packed_layout(full).value(g) + i)];
              }
          fresh.insert(fresh.end(), values.begin() + (b * full.seq + past) * row,
                       values.begin() + (b + 1) * full.seq * row);
        }
        AttentionShape step = full;
        step.seq = now;
        const Array qkv(type, fresh);
        const auto cached_tokens = static_cast<int32_t>(past);
        const auto y = run_kernel({Array::zeros(type, batch * now * width), Array(type, k), Array(type, v),
                                   Array::zeros(DType::f32, batch * full.heads() * now, NAN)},
                                  [&](kernels::Context& c, Vec<Array>& out) {
                                    const PackedViews x(qkv, packed_layout(step));
                                    attention().decode(
                                        c, step, x.q, x.k, x.v, out[1].out(), out[2].out(), &cached_tokens,
                                        capacity, view_of(out[0], contiguous_heads(2, 2, d)), out[3].f32());
                                  });
        Vec<double> lse;
        const auto expected = reference::attention(full, values, {}, {}, &lse);
        Vec<double> tail, tail_lse;
        for (int64_t b = 0; b < batch; ++b)
          tail.insert(tail.end(), expected.begin() + (b * full.seq + past) * width,
                      expected.begin() + (b + 1) * full.seq * width);
        for (int64_t of_head = 0; of_head < batch * full.heads(); ++of_head)
          tail_lse.insert(tail_lse.end(), lse.begin() + of_head * full.seq + past,
                          lse.begin() + (of_head + 1) * full.seq);
        INFO("past=", past, " now=", now, " window=", window, " ", text(type));
        CHECK(error(y[0].rounded(), tail) < attention_tolerance(type));
        CHECK(error(y[3].rounded(), tail_lse) < 1e-5);
        const auto cached = y[1].rounded();
        CHECK(cached[static_cast<size_t>(past * d)] ==
              values[static_cast<size_t>(past * row + packed_layout(full).key(0))]);
        CHECK(cached[static_cast<size_t>((past + now) * d)] == 3.0);
      }
}

// Queries, keys, values and outputs with strides of their own: heads of a group far apart, keys and values of
// different widths in one array, gaps that nothing may write to.
struct ViewCase {
  AttentionShape a;
  kernels::HeadStrides q, kv, out;
  int64_t q_size, kv_size, out_size;
  // gap: in elements; every gap is a multiple of it.
  ViewCase(int64_t groups, int64_t per_group, int64_t qk, int64_t v, int64_t batch, int64_t seq,
           int64_t gap = 1)
      : a(attention_shape(groups, per_group, qk, batch, seq)) {
    a.v_dim = v;
    q = {groups * per_group * qk + 3 * gap, qk, groups * qk};
    kv = {groups * (qk + v + gap) + 5 * gap, qk + v + gap, 0};
    out = {groups * per_group * (v + 2 * gap), per_group * (v + 2 * gap), v + 2 * gap};
    q_size = batch * seq * q.token;
    kv_size = batch * seq * kv.token;
    out_size = batch * seq * out.token;
  }
};
// The elements of all heads, token by token.
Vec<double> gathered(const Vec<double>& x, const kernels::HeadStrides& strides, int64_t first, int64_t tokens,
                     int64_t groups, int64_t per_group, int64_t width) {
  Vec<double> result;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t h = 0; h < per_group; ++h) {
        const auto begin = x.begin() + first + strides.at(t, g, h);
        result.insert(result.end(), begin, begin + width);
      }
  return result;
}
// The number of elements with the value of an untouched output.
int64_t untouched(const Array& x) {
  const auto values = x.rounded();
  return std::count(values.begin(), values.end(), 99.0);
}

void check_views(const ViewCase& c, DType type, const Vec<int32_t>& documents, uint64_t seed) {
  const AttentionShape& a = c.a;
  INFO("groups=", a.groups, " heads/group=", a.heads_per_group, " qk=", a.qk_dim, " v=", a.v_dim,
       " batch=", a.batch, " seq=", a.seq, " causal=", a.causal, " window=", a.window, " softcap=", a.softcap,
       " dropout=", a.dropout, " packed=", !documents.empty(), " ", text(type));
  const int64_t tokens = a.batch * a.seq, per_group = a.heads_per_group, groups = a.groups;
  const Array q(type, random_values(c.q_size, seed)), kv(type, random_values(c.kv_size, seed + 1)),
      dout(type, random_values(c.out_size, seed + 2));
  const auto all_ids = dropout_rows(tokens);
  const int64_t* ids = a.dropout > 0 ? all_ids.data() : nullptr;
  const kernels::Documents packing{.start = documents.empty() ? nullptr : documents.data()};
  const reference::Qkv<double> x{gathered(q.rounded(), c.q, 0, tokens, groups, per_group, a.qk_dim),
                                 gathered(kv.rounded(), c.kv, 0, tokens, groups, 1, a.qk_dim),
                                 gathered(kv.rounded(), c.kv, a.qk_dim, tokens, groups, 1, a.v_dim)};
  const auto y = run_kernel(
      {Array::zeros(type, c.out_size, 99), Array::zeros(DType::f32, a.batch * a.heads() * a.seq, NAN)},
      [&](kernels::Context& context, Vec<Array>& o) {
        attention().forward(context, a, view_of(q, c.q), view_of(kv, c.kv), view_of(kv, c.kv, a.qk_dim),
                            packing, ids, view_of(o[0], c.out), o[1].f32());
      });
  Vec<double> lse;
  const auto expected = reference::attention(a, x, documents, all_ids, &lse);
  const auto of_outputs = [&](const Array& array) {
    return gathered(array.rounded(), c.out, 0, tokens, groups, per_group, a.v_dim);
  };
  CHECK(error(of_outputs(y[0]), expected) < attention_tolerance(type));
  CHECK(error(y[1].rounded(), lse) < 1e-5);
  CHECK(untouched(y[0]) == c.out_size - tokens * a.heads() * a.v_dim);

  const auto g = run_kernel({Array::zeros(type, c.q_size, 99), Array::zeros(type, c.kv_size, 99)},
                            [&](kernels::Context& context, Vec<Array>& o) {
                              Array saved = y[1];
                              attention().backward(
                                  context, a, view_of(q, c.q), view_of(kv, c.kv), view_of(kv, c.kv, a.qk_dim),
                                  view_of(y[0], c.out), saved.f32(), view_of(dout, c.out), packing, ids,
                                  view_of(o[0], c.q), view_of(o[1], c.kv), view_of(o[1], c.kv, a.qk_dim));
                            });
  const auto gradient = reference::attention_gradient(a, x, of_outputs(dout), documents, all_ids);
  const reference::Qkv<double> got{gathered(g[0].rounded(), c.q, 0, tokens, groups, per_group, a.qk_dim),
                                   gathered(g[1].rounded(), c.kv, 0, tokens, groups, 1, a.qk_dim),
                                   gathered(g[1].rounded(), c.kv, a.qk_dim, tokens, groups, 1, a.v_dim)};
  CHECK(error(reference::joined(got), reference::joined(gradient)) < 2 * attention_tolerance(type));
  CHECK(untouched(g[0]) == c.q_size - tokens * a.heads() * a.qk_dim);
  CHECK(untouched(g[1]) == c.kv_size - tokens * groups * (a.qk_dim + a.v_dim));
}

TEST_CASE("attention on separate views with their own strides; widths of queries and values differ") {
  uint64_t seed = 1200;
  for (DType type : kTypes)
    for (const auto [qk, v] : {std::array<int64_t, 2>{24, 24}, {19, 7}, {7, 45}, {96, 64}, {33, 65}})
      for (const int64_t seq : sizes<int64_t>({1, 37, 150}, {1, 37, 140})) {
        ViewCase c(2, 3, qk, v, 2, seq);
        const auto check = [&](const Vec<int32_t>& starts) {
          if (runs_case(seed, 13)) check_views(c, type, starts, seed);
          ++seed;
        };
        check({});
        check(packed_documents(2, seq, 4));
        c.a.window = 21;
        c.a.dropout = 0.2f;
        c.a.head_offset = 5;
        check(packed_documents(2, seq, 5));
        c.a.softcap = 0.9f;
        check({});
        c.a.window = 0;
        c.a.dropout = 0;
        c.a.causal = false;
        check({});
      }
}

TEST_CASE("generation with a cache on separate views; widths of queries and values differ") {
  uint64_t seed = 1500;
  for (DType type : kTypes)
    for (const auto [past, now] : {std::array<int64_t, 2>{0, 9}, {1, 1}, {64, 2}, {100, 70}})
      for (const auto [qk, v] : {std::array<int64_t, 2>{19, 7}, {33, 65}}) {
        const ViewCase full(2, 3, qk, v, 2, past + now);
        const AttentionShape& a = full.a;
        const int64_t batch = a.batch, capacity = past + now + 3;
        const Array q(type, random_values(full.q_size, seed++)),
            kv(type, random_values(full.kv_size, seed++));
        const reference::Qkv<double> x{gathered(q.rounded(), full.q, 0, batch * a.seq, 2, 3, qk),
                                       gathered(kv.rounded(), full.kv, 0, batch * a.seq, 2, 1, qk),
                                       gathered(kv.rounded(), full.kv, qk, batch * a.seq, 2, 1, v)};
        const auto expected = reference::attention(a, x, {}, {}, nullptr);
        // All tokens in two steps, the new ones of each sequence gathered.
        Vec<Array> caches{Array::zeros(type, batch * 2 * capacity * qk, 3),
                          Array::zeros(type, batch * 2 * capacity * v, 3)};
        for (const auto [first, count] : {std::array<int64_t, 2>{0, past}, {past, now}}) {
          if (count == 0) continue;
          AttentionShape step = a;
          step.seq = count;
          const auto of = [&](const Array& all, int64_t width) {
            const auto values = all.rounded();
            Vec<double> part;
            for (int64_t b = 0; b < batch; ++b)
              part.insert(part.end(), values.begin() + (b * a.seq + first) * width,
                          values.begin() + (b * a.seq + first + count) * width);
            return Array(type, part);
          };
          const Array q_step = of(q, full.q.token), kv_step = of(kv, full.kv.token);
          const auto before = static_cast<int32_t>(first);
          const auto y =
              run_kernel({Array::zeros(type, batch * count * full.out.token, 99), caches[0], caches[1]},
                         [&](kernels::Context& c, Vec<Array>& o) {
                           attention().decode(c, step, view_of(q_step, full.q), view_of(kv_step, full.kv),
                                              view_of(kv_step, full.kv, qk), o[1].out(), o[2].out(), &before,
                                              capacity, view_of(o[0], full.out), nullptr);
                         });
          caches = {y[1], y[2]};
          Vec<double> tail;
          for (int64_t b = 0; b < batch; ++b)
            tail.insert(tail.end(), expected.begin() + (b * a.seq + first) * 6 * v,
                        expected.begin() + (b * a.seq + first + count) * 6 * v);
          INFO("past=", first, " now=", count, " qk=", qk, " v=", v, " ", text(type));
          CHECK(error(gathered(y[0].rounded(), full.out, 0, batch * count, 2, 3, v), tail) <
                attention_tolerance(type));
        }
      }
}

// At these sizes cuDNN computes on the GPUs of kernels/cuda/attention_choice.hpp, if the backend has it.
TEST_CASE("attention of sequences as long as those of training") {
  if (are_simulated()) return;
  uint64_t seed = 1700;
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const auto [groups, per_group, d, seq, window] :
         {std::array<int64_t, 5>{2, 1, 64, 512, 0}, {2, 2, 128, 512, 0}, {1, 2, 64, 640, 200}}) {
      AttentionShape a = attention_shape(groups, per_group, d, 2, seq);
      a.window = window;
      if (runs_case(seed, 1)) check_attention(a, type, {}, seed);
      ++seed;
    }
    check_views(ViewCase(2, 1, 192, 128, 1, 512, 8), type, {}, seed++);
  }
}

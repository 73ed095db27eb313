#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::AttentionShape;
using kernels::QkvLayout;
using reference::Complex;

namespace {
const kernels::Attention& attention() {
  return *kernels::cpu_table().attention;
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
                     double scale = 1) {
  INFO("groups=", a.qkv.groups, " heads/group=", a.qkv.heads_per_group, " d=", a.qkv.head_dim,
       " batch=", a.batch, " seq=", a.seq, " causal=", a.causal, " window=", a.window, " softcap=", a.softcap,
       " dropout=", a.dropout, " packed=", !documents.empty(), " ", text(type));
  const int64_t tokens = a.batch * a.seq, heads = a.qkv.heads(), d = a.qkv.head_dim;
  const Array qkv(type, random_values(tokens * a.qkv.row(), seed, scale)),
      dout(type, random_values(tokens * heads * d, seed + 1));
  const auto ids = dropout_rows(tokens);
  const int32_t* document_start = documents.empty() ? nullptr : documents.data();
  const auto y = run_kernel(
      {Array::zeros(type, tokens * heads * d, NAN), Array::zeros(DType::f32, a.batch * heads * a.seq, NAN)},
      [&](kernels::Context& c, Vec<Array>& out) {
        attention().forward(c, a, qkv, document_start, a.dropout > 0 ? ids.data() : nullptr, out[0].out(),
                            out[1].f32());
      });
  Vec<double> lse;
  const auto expected = reference::attention(a, qkv.rounded(), documents, ids, &lse);
  CHECK(error(y[0].rounded(), expected) < tolerance(type));
  CHECK(error(y[1].rounded(), lse) < 1e-5);

  const auto g =
      run_kernel({Array::zeros(type, tokens * a.qkv.row(), NAN)}, [&](kernels::Context& c, Vec<Array>& out) {
        Array saved = y[1];
        attention().backward(c, a, qkv, y[0], saved.f32(), dout, document_start,
                             a.dropout > 0 ? ids.data() : nullptr, out[0].out());
      });
  const auto gradient = reference::attention_gradient(a, qkv.rounded(), dout.rounded(), documents, ids);
  CHECK(error(g[0].rounded(), gradient) < 2 * tolerance(type));
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
    const auto qkv = random_values(14 * a.qkv.row(), 1), dout = random_values(14 * 4 * 3, 2);
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
      check_attention(attention_shape(2, 2, d, 1, 70), type, {}, seed++);
    for (int64_t seq : {1, 2, 17, 63, 64, 65, 130, 200, 257})
      check_attention(attention_shape(1, 3, 16, 2, seq), type, {}, seed++);
    for (int64_t groups : {1, 2, 3, 4})
      check_attention(attention_shape(groups, 1, 24, 2, 33), type, {}, seed++);
    check_attention(attention_shape(2, 4, 5, 1, 40), type, {}, seed++);
  }
}

TEST_CASE("attention without causality, with windows, packed documents and dropout") {
  uint64_t seed = 100;
  for (DType type : kTypes)
    for (int64_t seq : {31, 150, 300}) {
      AttentionShape a = attention_shape(2, 2, 16, 2, seq);
      const auto documents = packed_documents(2, seq, 4);
      check_attention(a, type, documents, seed++);
      a.dropout = 0.25f;
      a.head_offset = 6;
      check_attention(a, type, {}, seed++);
      a.window = 37;
      check_attention(a, type, {}, seed++);
      check_attention(a, type, documents, seed++);
      a.dropout = 0;
      check_attention(a, type, {}, seed++);
      a.window = 1;
      check_attention(a, type, {}, seed++);
      a.window = 0;
      a.causal = false;
      check_attention(a, type, {}, seed++);
      a.dropout = 0.1f;
      check_attention(a, type, {}, seed++);
    }
}

TEST_CASE("attention with large logits does not overflow") {
  AttentionShape a = attention_shape(1, 2, 16, 1, 140);
  a.scale = 20;
  check_attention(a, DType::f32, {}, 7, 0.5);
}

TEST_CASE("capped logits: masks, documents, dropout, caps that bind and caps that do not") {
  uint64_t seed = 500;
  for (DType type : kTypes)
    for (const auto [seq, d] : {std::array<int64_t, 2>{5, 5}, {65, 16}, {150, 24}})
      for (const float cap : {0.6f, 50.0f}) {
        AttentionShape a = attention_shape(2, 2, d, 2, seq);
        a.softcap = cap;
        check_attention(a, type, {}, seed++);
        a.window = 13;
        check_attention(a, type, packed_documents(2, seq, 4), seed++);
        a.window = 0;
        a.dropout = 0.2f;
        check_attention(a, type, {}, seed++);
        a.dropout = 0;
        a.causal = false;
        check_attention(a, type, {}, seed++);
      }
  AttentionShape a = attention_shape(1, 2, 16, 1, 140);
  a.scale = 20;  // nearly all logits at the cap
  a.softcap = 30;
  check_attention(a, DType::f32, {}, 7, 0.5);
}

TEST_CASE("queries that see nothing give zero and no gradient") {
  AttentionShape a = attention_shape(1, 2, 16, 1, 70);
  Vec<int32_t> documents(70, 0);
  for (size_t i = 20; i < 30; ++i) documents[i] = 1000;  // "starts later than this token": no key is left
  check_attention(a, DType::f32, documents, 8);
}

// The same attention in bf16 and in fp32 on its widened inputs: only rounding may be between them.
void check_narrow(const AttentionShape& a, const Vec<int32_t>& documents, uint64_t seed) {
  INFO("groups=", a.qkv.groups, " heads/group=", a.qkv.heads_per_group, " d=", a.qkv.head_dim,
       " batch=", a.batch, " seq=", a.seq, " causal=", a.causal, " window=", a.window, " softcap=", a.softcap,
       " dropout=", a.dropout, " packed=", !documents.empty());
  const int64_t tokens = a.batch * a.seq, heads = a.qkv.heads(), d = a.qkv.head_dim;
  const Array qkv(DType::bf16, random_values(tokens * a.qkv.row(), seed)),
      dout(DType::bf16, random_values(tokens * heads * d, seed + 1));
  const auto ids = dropout_rows(tokens);
  const int32_t* document_start = documents.empty() ? nullptr : documents.data();
  const int64_t* dropout_rows = a.dropout > 0 ? ids.data() : nullptr;
  const auto forward = [&](DType type) {
    const Array x(type, qkv.rounded());
    return run_kernel(
        {Array::zeros(type, tokens * heads * d, NAN), Array::zeros(DType::f32, a.batch * heads * a.seq, NAN)},
        [&](kernels::Context& c, Vec<Array>& o) {
          attention().forward(c, a, x, document_start, dropout_rows, o[0].out(), o[1].f32());
        });
  };
  const auto narrow = forward(DType::bf16), wide = forward(DType::f32);
  CHECK(error(narrow[0].rounded(), wide[0].rounded()) < 0.004);  // half a step of bf16 and the rest of P
  CHECK(error(narrow[1].rounded(), wide[1].rounded()) < 2e-6);
  const auto backward = [&](DType type) {
    const Array x(type, qkv.rounded()), y(type, narrow[0].rounded()), dy(type, dout.rounded());
    Array lse = wide[1];
    return run_kernel({Array::zeros(type, tokens * a.qkv.row(), NAN)},
                      [&](kernels::Context& c, Vec<Array>& o) {
                        attention().backward(c, a, x, y, lse.f32(), dy, document_start, dropout_rows,
                                             o[0].out());
                      })[0]
        .rounded();
  };
  CHECK(error(backward(DType::bf16), backward(DType::f32)) < 0.01);
}

TEST_CASE("bf16 attention is fp32 attention of the widened inputs but for rounding") {
  uint64_t seed = 900;
  for (const auto [seq, d] : {std::array<int64_t, 2>{1, 1},
                              {7, 3},
                              {31, 33},
                              {33, 31},
                              {65, 40},
                              {129, 64},
                              {193, 72},
                              {259, 96}}) {
    AttentionShape a = attention_shape(2, 3, d, 2, seq);
    check_narrow(a, {}, seed++);
    check_narrow(a, packed_documents(2, seq, 4), seed++);
    a.dropout = 0.2f;
    a.window = 43;
    check_narrow(a, {}, seed++);
    a.softcap = 0.7f;
    check_narrow(a, packed_documents(2, seq, 5), seed++);
    a.window = 0;
    a.causal = false;
    check_narrow(a, {}, seed++);
  }
}

TEST_CASE("dropout drops the same pairs in bf16 as in fp32") {
  AttentionShape a = attention_shape(2, 2, 150, 1, 150);
  a.dropout = 0.4f;
  auto values = random_values(a.seq * a.qkv.row(), 77);
  for (int64_t t = 0; t < a.seq; ++t)  // value of key t: one at t, so that outputs are the weights
    for (int64_t g = 0; g < 2; ++g)
      for (int64_t i = 0; i < 150; ++i)
        values[static_cast<size_t>(t * a.qkv.row() + a.qkv.value(g) + i)] = i == t ? 1 : 0;
  const auto ids = dropout_rows(a.seq);
  Vec<bool> kept[2];
  for (size_t type = 0; type < 2; ++type) {
    const Array qkv(kTypes[type], values);
    const auto y =
        run_kernel({Array::zeros(kTypes[type], a.seq * 4 * 150), Array::zeros(DType::f32, a.seq * 4)},
                   [&](kernels::Context& c, Vec<Array>& o) {
                     attention().forward(c, a, qkv, nullptr, ids.data(), o[0].out(), o[1].f32());
                   });
    for (const double p : y[0].rounded()) kept[type].push_back(p > 0);
  }
  CHECK(kept[0] == kept[1]);
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
        const int64_t batch = 2, capacity = past + now + 3, d = 24, row = full.qkv.row(),
                      width = full.qkv.heads() * d;
        const Array all(type, random_values(batch * full.seq * row, 21));
        const auto values = all.rounded();
        Vec<double> k(static_cast<size_t>(batch * 2 * capacity * d), 3.0), v = k, fresh;
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t g = 0; g < 2; ++g)
            for (int64_t t = 0; t < past; ++t)
              for (int64_t i = 0; i < d; ++i) {
                const auto to = static_cast<size_t>(((b * 2 + g) * capacity + t) * d + i);
                k[to] = values[static_cast<size_t>((b * full.seq + t) * row + full.qkv.key(g) + i)];
                v[to] = values[static_cast<size_t>((b * full.seq + t) * row + full.qkv.value(g) + i)];
              }
          fresh.insert(fresh.end(), values.begin() + (b * full.seq + past) * row,
                       values.begin() + (b + 1) * full.seq * row);
        }
        AttentionShape step = full;
        step.seq = now;
        const Array qkv(type, fresh);
        const auto y = run_kernel({Array::zeros(type, batch * now * width), Array(type, k), Array(type, v)},
                                  [&](kernels::Context& c, Vec<Array>& out) {
                                    attention().decode(c, step, qkv, out[1].out(), out[2].out(), past,
                                                       capacity, out[0].out());
                                  });
        const auto expected = reference::attention(full, values, {}, {}, nullptr);
        Vec<double> tail;
        for (int64_t b = 0; b < batch; ++b)
          tail.insert(tail.end(), expected.begin() + (b * full.seq + past) * width,
                      expected.begin() + (b + 1) * full.seq * width);
        INFO("past=", past, " now=", now, " window=", window, " ", text(type));
        CHECK(error(y[0].rounded(), tail) < tolerance(type));
        const auto cached = y[1].rounded();
        CHECK(cached[static_cast<size_t>(past * d)] ==
              values[static_cast<size_t>(past * row + full.qkv.key(0))]);
        CHECK(cached[static_cast<size_t>((past + now) * d)] == 3.0);
      }
}

TEST_CASE("rotary embedding, both forms, partial, and back") {
  const auto& rope = attention().rope;
  for (DType type : kTypes)
    for (bool interleaved : {false, true})
      for (const auto [d, rotary] :
           {std::array<int64_t, 2>{64, 64}, {16, 16}, {24, 10}, {80, 32}, {128, 6}}) {
        const QkvLayout layout{2, 3, d};
        const int64_t rows = 19, positions_max = 50;
        const auto positions = random_ints(rows, 3, positions_max);
        Vec<double> cos, sin;
        for (int64_t p = 0; p < positions_max; ++p)
          for (int64_t i = 0; i < rotary / 2; ++i) {
            const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) /
                                                                                static_cast<double>(rotary));
            cos.push_back(std::cos(angle));
            sin.push_back(std::sin(angle));
          }
        Array c32(DType::f32, cos), s32(DType::f32, sin);
        const Array x(type, random_values(rows * layout.row(), 4));
        for (bool inverse : {false, true}) {
          INFO("d=", d, " rotary=", rotary, " interleaved=", interleaved, " inverse=", inverse, " ",
               text(type));
          const auto y = run_kernel({x}, [&](kernels::Context& c, Vec<Array>& out) {
            rope(c, layout, out[0].out(), c32.f32(), s32.f32(), positions.data(), rows, rotary, interleaved,
                 inverse);
          });
          const auto expected = reference::rope(layout, x.rounded(), c32.rounded(), s32.rounded(), positions,
                                                rotary, interleaved, inverse);
          CHECK(error(y[0].rounded(), expected) < tolerance(type) * 0.5);
          const auto back = run_kernel({y[0]}, [&](kernels::Context& c, Vec<Array>& out) {
            rope(c, layout, out[0].out(), c32.f32(), s32.f32(), positions.data(), rows, rotary, interleaved,
                 !inverse);
          });
          CHECK(error(back[0].rounded(), x.rounded()) < tolerance(type));
        }
      }
}

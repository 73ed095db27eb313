// Shards of attention combined, against the scalar reference of the full sequence.
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::AttentionBlock;
using kernels::AttentionShape;
using kernels::PositionSegment;
using kernels::PositionSegments;

namespace {
const kernels::ContextAttention& parts() {
  return *testing::table().context_attention;
}

// The positions of the sequence that each rank holds: up to two segments of any lengths.
using Shards = Vec<PositionSegments>;

// Values of x[batch * seq][width] in the rows of `segments`, sequence by sequence.
template <class T>
Vec<T> rows_of(const Vec<T>& x, const AttentionShape& a, const PositionSegments& segments, int64_t width) {
  Vec<T> part;
  for (int64_t b = 0; b < a.batch; ++b)
    for (const PositionSegment& segment : segments.segments)
      part.insert(part.end(), x.begin() + (b * a.seq + segment.begin) * width,
                  x.begin() + (b * a.seq + segment.end()) * width);
  return part;
}
void put_rows(Vec<double>& x, const Vec<double>& part, const AttentionShape& a,
              const PositionSegments& segments, int64_t width) {
  auto from = part.begin();
  for (int64_t b = 0; b < a.batch; ++b)
    for (const PositionSegment& segment : segments.segments)
      for (int64_t i = 0; i < segment.count * width; ++i)
        x[static_cast<size_t>((b * a.seq + segment.begin) * width + i)] += *from++;
}
// Queries [tokens][heads][qk_dim]; keys and values [tokens][groups][qk_dim + v_dim].
void check_shards(const AttentionShape& a, DType type, const Shards& shards, const Vec<int32_t>& documents,
                  uint64_t seed, bool cumulative = false) {
  INFO("cumulative=", cumulative, " groups=", a.groups, " heads/group=", a.heads_per_group, " qk=", a.qk_dim,
       " v=", a.v_dim, " batch=", a.batch, " seq=", a.seq, " causal=", a.causal, " window=", a.window,
       " softcap=", a.softcap, " dropout=", a.dropout, " packed=", !documents.empty(),
       " ranks=", shards.size(), " ", text(type));
  const int64_t tokens = a.batch * a.seq, heads = a.heads(), width = heads * a.v_dim, row = heads * a.qk_dim,
                kv_row = a.groups * (a.qk_dim + a.v_dim);
  const kernels::HeadStrides queries = contiguous_heads(a.groups, a.heads_per_group, a.qk_dim),
                             outputs = contiguous_heads(a.groups, a.heads_per_group, a.v_dim),
                             keys_values = contiguous_heads(a.groups, 1, a.qk_dim + a.v_dim);
  const auto q = Array(type, random_values(tokens * row, seed)).rounded(),
             kv = Array(type, random_values(tokens * kv_row, seed + 2)).rounded(),
             dout = Array(type, random_values(tokens * width, seed + 1)).rounded();
  const auto ids = dropout_rows(tokens);
  const Vec<int32_t> bounds = document_bounds(documents, a.seq);
  Vec<double> out(static_cast<size_t>(tokens * width)), saved_out(out.size()), dq_sum(q.size()),
      dkv_sum(kv.size());
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    AttentionBlock part{a, shards[rank], {}};
    part.shape.seq = part.queries.rows();
    const int64_t mine = a.batch * part.shape.seq;
    const Array my_q(type, rows_of(q, a, shards[rank], row)),
        my_dout(type, rows_of(dout, a, shards[rank], width));
    const auto my_ids = rows_of(ids, a, shards[rank], 1);
    const auto my_documents = documents.empty() ? Vec<int32_t>() : rows_of(documents, a, shards[rank], 1);
    const kernels::Documents packing = packing_of(my_documents, bounds, cumulative);
    const int64_t* dropout_row = a.dropout > 0 ? my_ids.data() : nullptr;
    Vec<Array> y{Array::zeros(DType::f32, mine * width, NAN), Array::zeros(DType::f32, mine * heads, NAN)};
    // As in a ring: the own keys first, then those of the rank before.
    for (size_t step = 0; step < shards.size(); ++step) {
      part.keys = shards[(rank + shards.size() - step) % shards.size()];
      const Array from(type, rows_of(kv, a, part.keys, kv_row));
      if (step > 0 && !part.attends_to_any()) continue;
      y = run_kernel(y, [&](kernels::Context& c, Vec<Array>& o) {
        parts().forward(c, part, view_of(my_q, queries), view_of(from, keys_values),
                        view_of(from, keys_values, a.qk_dim), packing, dropout_row, step > 0,
                        view_of(o[0], outputs), o[1].f32());
      });
    }
    put_rows(out, y[0].rounded(), a, shards[rank], width);
    const Array saved(type, y[0].rounded());
    put_rows(saved_out, saved.rounded(), a, shards[rank], width);
    Array lse = y[1], dq = Array::zeros(DType::f32, mine * row);
    for (const PositionSegments& keys : shards) {
      part.keys = keys;
      const Array from(type, rows_of(kv, a, keys, kv_row));
      const auto g = run_kernel(
          {dq, Array::zeros(DType::f32, a.batch * keys.rows() * kv_row, NAN)},
          [&](kernels::Context& c, Vec<Array>& o) {
            parts().backward(c, part, view_of(my_q, queries), view_of(from, keys_values),
                             view_of(from, keys_values, a.qk_dim), view_of(saved, outputs), lse.f32(),
                             view_of(my_dout, outputs), packing, dropout_row, view_of(o[0], queries),
                             view_of(o[1], keys_values), view_of(o[1], keys_values, a.qk_dim));
          });
      dq = g[0];
      const auto dkv = g[1].rounded();
      if (!part.attends_to_any()) CHECK(std::all_of(dkv.begin(), dkv.end(), [](double v) { return v == 0; }));
      put_rows(dkv_sum, dkv, a, keys, kv_row);
    }
    put_rows(dq_sum, dq.rounded(), a, shards[rank], row);
  }
  // Keys and values of all rows, concatenated.
  const auto columns = [&](const Vec<double>& x, int64_t first, int64_t count) {
    Vec<double> result;
    for (size_t head = 0; head < x.size(); head += static_cast<size_t>(a.qk_dim + a.v_dim)) {
      const auto begin = x.begin() + static_cast<int64_t>(head) + first;
      result.insert(result.end(), begin, begin + count);
    }
    return result;
  };
  const reference::Qkv<double> x{q, columns(kv, 0, a.qk_dim), columns(kv, a.qk_dim, a.v_dim)};
  const bool rounds = type != DType::f32 && rounds_attention_weights();
  // Sums are fp32; kernels that keep the rest of rounded weights lose 2^-17 of each.
  const double allowed = type == DType::f32 ? 2e-5 : rounds ? 4 * tolerance(type) : 1e-4;
  const auto gradient = reference::attention_gradient(a, x, dout, documents, ids, &saved_out);
  CHECK(error(out, reference::attention(a, x, documents, ids, nullptr)) <
        (rounds ? 2 * tolerance(type) : 1e-5));
  const auto k_sum = columns(dkv_sum, 0, a.qk_dim), v_sum = columns(dkv_sum, a.qk_dim, a.v_dim);
  // The largest of many errors grows with their number; their mean square does not.
  const auto got = reference::joined({dq_sum, k_sum, v_sum}), expected = reference::joined(gradient);
  CHECK(error(got, expected) < (rounds ? 1.25 : 1) * allowed);
  CHECK(rms_error(got, expected) < allowed / (rounds ? 16 : 4));
}

// Chunks r and 2 ranks - 1 - r of 2 ranks equal ones.
Shards balanced(int64_t ranks, int64_t seq) {
  const int64_t n = seq / (2 * ranks);
  Shards shards;
  for (int64_t r = 0; r < ranks; ++r) shards.push_back({{{{r * n, n}, {(2 * ranks - 1 - r) * n, n}}}});
  return shards;
}
}  // namespace

TEST_CASE("shards of a sequence give the attention of the full sequence: load-balanced chunks") {
  uint64_t seed = 300;
  for (const DType type : kTypes)
    for (const auto& [ranks, length] : {std::array<int64_t, 2>{2, 12}, {2, 300}, {3, 66}, {4, 264}}) {
      const int64_t seq = are_simulated() && ranks == 4 ? 40 : length;
      AttentionShape a = attention_shape(are_simulated() ? 1 : 2, 3, 20, 2, seq);
      const auto check = [&, ranks = ranks] {
        if (runs_case(seed, 7) && !(test::kSanitized && ranks == 4))
          check_shards(a, type, balanced(ranks, seq), {}, seed);
        ++seed;
      };
      check();
      a.dropout = 0.3f;
      a.head_offset = 7;
      check();
      a.causal = false;
      check();
      a.causal = true;
      a.dropout = 0;
      for (const int64_t window : {1, 5, 40}) {
        a.window = window;
        check();
      }
      a.softcap = 0.8f;
      check();
      // Values are narrower than keys.
      a.v_dim = 11;
      check();
    }
}

TEST_CASE(
    "shards of a sequence give the attention of the full sequence: any segments, documents that begin "
    "anywhere") {
  uint64_t seed = 400;
  const int64_t seq = 210;
  const Shards shards{
      {{{{0, 70}, {0, 0}}}}, {{{{71, 3}, {140, 69}}}}, {{{{70, 1}, {74, 66}}}}, {{{{0, 0}, {209, 1}}}}};
  Vec<int32_t> documents;
  for (int64_t i = 0; i < 2 * seq; ++i)
    documents.push_back(static_cast<int32_t>(i < seq ? i / 37 * 37 : (i - seq) < 101 ? 0 : 101));
  for (const int64_t window : {0, 30})
    for (const float dropout : {0.0f, 0.2f}) {
      AttentionShape a = attention_shape(1, 2, 9, 2, seq);
      a.window = window;
      a.dropout = dropout;
      const auto check = [&](DType type, const Vec<int32_t>& starts, bool cumulative) {
        if (runs_case(seed, 3)) check_shards(a, type, shards, starts, seed, cumulative);
        ++seed;
      };
      check(DType::f32, documents, false);
      check(DType::f32, documents, true);
      check(DType::f32, {}, false);
      check(DType::bf16, documents, false);
    }
}

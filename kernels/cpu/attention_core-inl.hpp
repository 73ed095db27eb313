// Shared by attention over full sequences (attention.cpp) and over shards of them (context_attention.cpp), a
// Highway "-inl" header: one block of queries against all keys, forward and backward. Templates over the GEMM
// implementation (attention_block-inl.hpp).

#include "kernels/cpu/attention_block-inl.hpp"

#if defined(CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#undef CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#else
#define CAPSTAN_KERNELS_CPU_ATTENTION_CORE_INL
#endif

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// ---- forward

// A worker's workspace: one block of scores, its output rows, and packed queries where needed.
template <class Gemms>
struct ForwardScratch {
  using Value = typename Gemms::Value;
  float *scores, *out, *max, *sum;
  // Maximum of each row in the current block of keys, and the factor that corrects earlier blocks.
  float *highest, *correction;
  Value *q, *narrow;
  uint32_t* words;
  size_t floats;
  ForwardScratch(float* base, HeadDims d) {
    ScratchAllocator t{base};
    scores = t.take(Gemms::kQueries * Gemms::kKeys);
    out = t.take(Gemms::kQueries * Gemms::padded(d.v));
    max = t.take(Gemms::kQueries);
    sum = t.take(Gemms::kQueries);
    highest = t.take(Gemms::kQueries);
    correction = t.take(Gemms::kQueries);
    q = t.template take<Value>(Gemms::kQueries * Gemms::padded(d.qk));
    narrow = t.template take<Value>(Gemms::narrow_size());
    words = t.template take<uint32_t>(kWords<Gemms>);
    floats = t.floats;
  }
};

// Keys [0, keys) of one head, packed.
template <class Gemms>
struct PackedKeys {
  const typename Gemms::Value *k_columns, *v_depth;
  int64_t keys;
};

// The initial state of a block of queries.
template <class Gemms>
HWY_INLINE void init_softmax_rows(const ForwardScratch<Gemms>& s, const Block<Gemms>& b, int64_t v_dim) {
  std::memset(s.out, 0, static_cast<size_t>(b.nq * Gemms::padded(v_dim)) * sizeof(float));
  for (int64_t i = 0; i < Gemms::kQueries; ++i) s.max[i] = -kInfinity, s.sum[i] = 0;
}

// Attends from the block of queries to the visible ones of these keys: s.max and s.sum are the running
// maximum and sum of the exponentials, s.out the weighted sum of values.
template <class Gemms>
HWY_INLINE void attend(const ForwardScratch<Gemms>& s, Block<Gemms>& b, const typename Gemms::LeftOperand& q,
                       const PackedKeys<Gemms>& kv, HeadDims d, Logits logits, const DropoutMask& drop,
                       const int64_t* dropout_rows) {
  constexpr int64_t kKeys = Gemms::kKeys;
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  // Capped logits are scaled already.
  const VF scale = splat(logits.softcap > 0 ? 1.0f : logits.scale);
  const int64_t width = Gemms::padded(d.v);

  if constexpr (Gemms::kFuses)
    if (drop.p == 0 && logits.softcap == 0) return Gemms::attend_block(s, b, q, kv, d, logits.scale);
  for (int64_t k0 = b.begin; k0 < b.end; k0 += kKeys) {
    b.at_keys(k0);
    Gemms::scores(b, q, kv.k_columns, kv.keys, d.qk, s.scores);
    // Separate passes over all rows, because within one row each step would wait for the previous one.
    for (int64_t i = 0; i < Gemms::kQueries; ++i) s.highest[i] = -kInfinity;
    for (int64_t i = 0; i < b.nq; ++i) {
      float* row = s.scores + i * kKeys;
      int64_t from, to, begin, end;
      b.keys_of(i, from, to);
      if (from == to) {
        std::memset(row, 0, static_cast<size_t>(b.width) * sizeof(float));
        continue;
      }
      if (logits.softcap > 0) cap_row(row, from, to, logits);
      mask_row(row, from, to, b.width, begin, end);
      VF m = load(row + begin);
      for (int64_t j = begin + kStep; j < end; j += kStep) m = hn::Max(m, load(row + j));
      s.highest[i] = max_lanes(hn::Mul(m, scale));
    }
    for (int64_t i = 0; i < Gemms::kQueries; i += kStep) {
      const VF before = load(s.max + i), top = hn::Max(before, load(s.highest + i));
      const VF correction =
          hn::IfThenElse(hn::Eq(before, top), splat(1.0f), exp_not_positive(hn::Sub(before, top)));
      store(top, s.max + i);
      store(correction, s.correction + i);
      store(hn::Mul(load(s.sum + i), correction), s.sum + i);
    }
    for (int64_t i = 0; i < b.nq; ++i) {
      float *row = s.scores + i * kKeys, *o = s.out + i * width;
      int64_t from, to;
      b.keys_of(i, from, to);
      if (from == to) continue;
      const int64_t begin = from / kStep * kStep, end = round_up(to, kStep);
      const VF f = splat(s.correction[i]), top = splat(s.max[i]);
      for_vectors(
          d.v, [&](int64_t j) HWY_ATTR { store(hn::Mul(load(o + j), f), o + j); },
          [&](int64_t j, int64_t n) HWY_ATTR { store_part(hn::Mul(load_part(o + j, n), f), o + j, n); });
      VF total = hn::Zero(DF());
      for (int64_t j = begin; j < end; j += kStep) {
        const VF p = exp_not_positive(hn::MulSub(load(row + j), scale, top));
        total = hn::Add(total, p);
        store(p, row + j);
      }
      s.sum[i] += sum_lanes(total);
      if (drop.p > 0) {
        const uint32_t* words = dropout_words(drop, dropout_rows[b.q0 + i], k0, b.width, s.words);
        for (int64_t j = begin; j < end; j += kStep)
          store(dropped(load(row + j), words + j, threshold, keep_factor), row + j);
      }
    }
    Gemms::weighted_rows(b, Weights::probabilities, s.scores, kv.v_depth, kv.keys, d.v, s.narrow, s.out);
  }
}

// ---- backward
//
// P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M, dS = P (dP -
// D), D = rowsum(dO O), dQ = scale dS K, dK = scale dS^T Q. With capped logits L = c tanh(scale q k^T / c) in
// place of scale q k^T, dS also times 1 - (L / c)².

// One worker's workspace for `queries` rows of queries and `keys` keys: key panels serve all heads of
// the group, query panels one head. dq and dk are not scaled yet.
template <class Gemms>
struct BackwardScratch {
  using Value = typename Gemms::Value;
  float *p, *dp, *dq, *delta, *dk, *dv;
  Value *q, *dout, *narrow, *k_columns, *v_columns, *k_depth, *q_rows, *dout_rows;
  uint32_t* words;
  size_t floats;
  BackwardScratch(float* base, int64_t queries, int64_t keys, HeadDims d) {
    ScratchAllocator t{base};
    p = t.take(Gemms::kQueries * Gemms::kKeys);
    dp = t.take(Gemms::kQueries * Gemms::kKeys);
    const int64_t qk_width = Gemms::padded(d.qk), v_width = Gemms::padded(d.v);
    dq = t.take(std::max(Gemms::kQueries * qk_width, kSlab * (qk_width + v_width)));
    delta = t.take(Gemms::kQueries);
    dk = t.take(Gemms::sums_size(keys, d.qk));
    dv = t.take(Gemms::sums_size(keys, d.v));
    q = t.template take<Value>(Gemms::kQueries * qk_width);
    dout = t.template take<Value>(Gemms::kQueries * v_width);
    narrow = t.template take<Value>(Gemms::narrow_size());
    k_columns = t.template take<Value>(Gemms::columns_size(keys, d.qk));
    v_columns = t.template take<Value>(Gemms::columns_size(keys, d.v));
    k_depth = t.template take<Value>(Gemms::depth_size(keys, d.qk));
    q_rows = t.template take<Value>(Gemms::query_rows_size(queries, d.qk));
    dout_rows = t.template take<Value>(Gemms::query_rows_size(queries, d.v));
    words = t.template take<uint32_t>(kWords<Gemms>);
    floats = t.floats;
  }
};

// P and dS of the current block of scores from Q K^T in s.p and dO V^T in s.dp; s.p then holds P with
// dropout.
template <bool kCapped, class Gemms>
HWY_INLINE void score_gradients(const BackwardScratch<Gemms>& s, const Block<Gemms>& b, const float* lse,
                                Logits logits, const DropoutMask& drop, const int64_t* dropout_rows) {
  constexpr int64_t kKeys = Gemms::kKeys;
  const auto threshold = hn::Set(DU(), dropout_threshold(drop.p));
  const VF keep_factor = splat(drop.p > 0 ? 1.0f / (1.0f - drop.p) : 1.0f);
  const VF scale = splat(kCapped ? 1.0f : logits.scale),
           inverse_cap = splat(kCapped ? 1.0f / logits.softcap : 0.0f);
  for (int64_t i = 0; i < b.nq; ++i) {
    float *p = s.p + i * kKeys, *dp = s.dp + i * kKeys;
    int64_t from, to, begin, end;
    b.keys_of(i, from, to);
    if (from == to) {
      std::memset(p, 0, static_cast<size_t>(b.width) * sizeof(float));
      std::memset(dp, 0, static_cast<size_t>(b.width) * sizeof(float));
      continue;
    }
    if constexpr (kCapped) cap_row(p, from, to, logits);
    mask_row(p, from, to, b.width, begin, end);
    std::memset(dp, 0, static_cast<size_t>(from) * sizeof(float));
    std::memset(dp + to, 0, static_cast<size_t>(b.width - to) * sizeof(float));
    const VF l = splat(lse[b.q0 + i]), delta = splat(s.delta[i]);
    const uint32_t* words =
        drop.p > 0 ? dropout_words(drop, dropout_rows[b.q0 + i], b.k0, b.width, s.words) : nullptr;
    for (int64_t j = begin; j < end; j += kStep) {
      const VF logit = load(p + j), pv = exp_not_positive(hn::MulSub(logit, scale, l));
      VF dpv = load(dp + j);
      if (drop.p > 0) {
        dpv = dropped(dpv, words + j, threshold, keep_factor);
        store(dropped(pv, words + j, threshold, keep_factor), p + j);
      } else {
        store(pv, p + j);
      }
      VF ds = hn::Mul(pv, hn::Sub(dpv, delta));
      // Hidden logits are -infinity: as if at the cap, their slope is 0.
      if constexpr (kCapped) {
        const VF t = hn::Max(hn::Mul(logit, inverse_cap), splat(-1.0f));
        ds = hn::Mul(ds, hn::NegMulAdd(t, t, splat(1.0f)));
      }
      store(ds, dp + j);
    }
  }
}

// The rows of one head's queries, outputs and output gradients, and the saved statistics of the forward pass.
struct QueryRows {
  Rows q, out, dout;
  const float* lse;
  // Dropout row indices of the queries; null without dropout.
  const int64_t* dropout_rows;
  // Rows in s.q_rows and s.dout_rows.
  int64_t count;
};

template <class Gemms>
HWY_INLINE void pack_queries(const BackwardScratch<Gemms>& s, const QueryRows& rows, HeadDims d) {
  Gemms::pack_query_rows(rows.q, 0, rows.count, rows.count, d.qk, s.q_rows);
  Gemms::pack_query_rows(rows.dout, 0, rows.count, rows.count, d.v, s.dout_rows);
}
template <class Gemms>
HWY_INLINE void pack_keys(const BackwardScratch<Gemms>& s, const Rows& k, const Rows& v, int64_t keys,
                          HeadDims d) {
  Gemms::pack_columns(k, 0, keys, keys, d.qk, s.k_columns);
  Gemms::pack_columns(v, 0, keys, keys, d.v, s.v_columns);
  Gemms::pack_depth(k, 0, keys, keys, d.qk, s.k_depth);
  std::memset(s.dk, 0, static_cast<size_t>(Gemms::sums_size(keys, d.qk)) * sizeof(float));
  std::memset(s.dv, 0, static_cast<size_t>(Gemms::sums_size(keys, d.v)) * sizeof(float));
}

// One block of queries against the packed keys: s.dq becomes its unscaled gradient, and its contributions are
// added to s.dk and s.dv.
template <class Gemms>
HWY_INLINE void backward_block(const BackwardScratch<Gemms>& s, Block<Gemms>& block, const QueryRows& rows,
                               int64_t keys, HeadDims d, Logits logits, const DropoutMask& drop) {
  const auto o_array = array_of<Any>(rows.out.base), do_array = array_of<Any>(rows.dout.base);
  const int64_t q0 = block.q0;
  const auto q = Gemms::pack_left(rows.q.from(q0), block.nq, d.qk, s.q);
  const auto dout = Gemms::pack_left(rows.dout.from(q0), block.nq, d.v, s.dout);
  std::memset(s.dq, 0, static_cast<size_t>(block.nq * Gemms::padded(d.qk)) * sizeof(float));
  for (int64_t i = 0; i < block.nq; ++i) {
    const int64_t o = rows.out.from(q0 + i).offset, g = rows.dout.from(q0 + i).offset;
    VF sum = hn::Zero(DF());
    for_vectors(
        d.v, [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(o_array.at(o + j), do_array.at(g + j), sum); },
        [&](int64_t j, int64_t n)
            HWY_ATTR { sum = hn::MulAdd(o_array.part(o + j, n), do_array.part(g + j, n), sum); });
    s.delta[i] = sum_lanes(sum);
  }
  for (int64_t k0 = block.begin; k0 < block.end; k0 += Gemms::kKeys) {
    block.at_keys(k0);
    if constexpr (Gemms::kFuses)
      if (drop.p == 0 && logits.softcap == 0) {
        Gemms::backward_keys(s, block, q, dout, rows.lse, rows.count, keys, d, logits.scale);
        continue;
      }
    Gemms::scores(block, q, s.k_columns, keys, d.qk, s.p);
    Gemms::scores(block, dout, s.v_columns, keys, d.v, s.dp);
    if (logits.softcap > 0)
      score_gradients<true>(s, block, rows.lse, logits, drop, rows.dropout_rows);
    else
      score_gradients<false>(s, block, rows.lse, logits, drop, rows.dropout_rows);
    Gemms::weighted_columns(block, Weights::probabilities, s.p, s.dout_rows, rows.count, d.v, s.narrow, s.dv);
    Gemms::weighted_columns(block, Weights::gradients, s.dp, s.q_rows, rows.count, d.qk, s.narrow, s.dk);
    Gemms::weighted_rows(block, Weights::gradients, s.dp, s.k_depth, keys, d.qk, s.narrow, s.dq);
  }
}

// put(i, dk, dv) for the rows of all keys. dk is not scaled yet; overwrites s.dq.
template <class Gemms, class Put>
HWY_INLINE void for_key_rows(const BackwardScratch<Gemms>& s, int64_t keys, HeadDims d, Put&& put) {
  const int64_t qk_width = Gemms::padded(d.qk), v_width = Gemms::padded(d.v);
  for (int64_t first = 0; first < keys; first += kSlab) {
    const float* dk = Gemms::key_rows(s.dk, first, d.qk, s.dq);
    const float* dv = Gemms::key_rows(s.dv, first, d.v, s.dq + kSlab * qk_width);
    for (int64_t i = 0; i < std::min(kSlab, keys - first); ++i)
      put(first + i, dk + i * qk_width, dv + i * v_width);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#endif

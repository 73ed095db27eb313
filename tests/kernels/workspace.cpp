// Every kernel with a workspace: it stays within what its family declares, and refuses less. Cases of
// families that a device lacks are left out.
#include <filesystem>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "tests/kernels/support.hpp"
#include "tests/support/files.hpp"
#include "tests/support/paths.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::WorkspaceSize;

namespace {

struct Case {
  std::string name;
  WorkspaceSize need;
  Vec<Array> outputs;
  std::function<void(kernels::Context&, Vec<Array>&)> run;
};

Array noise(DType type, int64_t n, uint64_t seed = 1) {
  return {type, random_values(n, seed)};
}

// Outputs before the kernel: a value that no kernel leaves there.
Array unset(DType type, int64_t n) {
  return Array::zeros(type, n, 96);
}

void add_gemms(std::vector<Case>& cases) {
  if (!testing::table().gemm) return;
  const auto& gemm = *testing::table().gemm;
  for (const auto [m, n, k] :
       {std::array<int64_t, 3>{64, 96, 64}, {129, 65, 131}, {530, 790, 600}, {176, 8, 300}, {5, 264, 1100}})
    for (const DType in : kTypes)
      for (const DType out : kTypes)
        for (const float alpha : {1.0f, 0.5f})
          for (int t = 0; t < 4; ++t) {
            if (test::kSanitized && (in != out || alpha != 1)) continue;
            kernels::GemmShape s{(t & 1) != 0, (t & 2) != 0, m, n, k};
            s.lda = s.trans_a ? m : k, s.ldb = s.trans_b ? k : n, s.ldc = n;
            const WorkspaceSize need = gemm.run_workspace(s, {in, in, out}, alpha, 1.0f);
            if (need.total(1) == 0) continue;
            cases.push_back({"gemm",
                             need,
                             {unset(out, m * n)},
                             [=, &gemm, a = noise(in, m * k), b = noise(in, n * k, 2)](kernels::Context& c,
                                                                                       Vec<Array>& y) {
                               gemm.run(c, s, kernels::In(a), kernels::In(b), y[0].out(), alpha, 1.0f, {});
                             }});
          }
  for (const auto kind : {kernels::GemmGroups::m, kernels::GemmGroups::k}) {
    kernels::GemmShape s{kind == kernels::GemmGroups::k, true, 130, 96, 200};
    s.lda = s.trans_a ? s.m : s.k, s.ldb = s.k, s.ldc = s.n, s.stride_b = s.n * s.k, s.stride_c = s.m * s.n;
    cases.push_back({"grouped gemm",
                     gemm.run_grouped_workspace(s, kind, 2, {DType::bf16, DType::bf16, DType::bf16}, 1, 1),
                     {unset(DType::bf16, 2 * s.stride_c)},
                     [=, &gemm, a = noise(DType::bf16, s.m * s.k), b = noise(DType::bf16, 2 * s.stride_b, 2)](
                         kernels::Context& c, Vec<Array>& y) {
                       const int64_t sizes[] = {70, 60};
                       gemm.run_grouped(c, s, kind, sizes, 2, kernels::In(a), kernels::In(b), y[0].out(), 1,
                                        1, {});
                     }});
  }
  for (const auto [rows, cols] : {std::array<int64_t, 2>{3, 5}, {1000, 37}, {5000, 64}})
    cases.push_back({"column_sum",
                     gemm.column_sum_workspace(rows, cols),
                     {unset(DType::f32, cols)},
                     [=, &gemm, x = noise(DType::f32, rows * cols)](kernels::Context& c, Vec<Array>& y) {
                       gemm.column_sum(c, x, y[0].f32(), rows, cols, cols, false);
                     }});
}

// Documents of a batch of equal sequences: the first ends after a third of each sequence.
struct TwoDocuments {
  std::vector<int32_t> start, cu_seqlens;
  TwoDocuments(int64_t batch, int64_t seq) {
    const auto first = static_cast<int32_t>(seq / 3), all = static_cast<int32_t>(seq);
    for (int32_t b = 0; b < batch; ++b) {
      cu_seqlens.insert(cu_seqlens.end(), {b * all, b * all + first});
      for (int32_t i = 0; i < all; ++i) start.push_back(i < first ? 0 : first);
    }
    cu_seqlens.push_back(static_cast<int32_t>(batch) * all);
  }
  int64_t count() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  kernels::Documents view() const {
    return {start.data(), cu_seqlens.data(), count(), static_cast<int64_t>(start.size())};
  }
};

void add_attention_of_documents(std::vector<Case>& cases) {
  if (!testing::table().attention) return;
  const auto& attention = *testing::table().attention;
  const kernels::AttentionShape a = attention_shape(2, 2, 24, 2, 33);
  const kernels::QkvLayout layout{2, 2, 24};
  const kernels::HeadStrides heads = contiguous_heads(2, 2, 24);
  const int64_t tokens = a.batch * a.seq, width = layout.heads() * 24, row = layout.row();
  const Array qkv = noise(DType::f32, tokens * row);
  const TwoDocuments documents(a.batch, a.seq);
  cases.push_back({"attention forward of documents",
                   attention.forward_workspace(a, DType::f32, documents.count()),
                   {unset(DType::f32, tokens * width), unset(DType::f32, tokens * layout.heads())},
                   [=, &attention](kernels::Context& c, Vec<Array>& y) {
                     const PackedViews x(qkv, layout);
                     attention.forward(c, a, x.q, x.k, x.v, documents.view(), nullptr, view_of(y[0], heads),
                                       y[1].f32());
                   }});
  cases.push_back({"attention backward of documents",
                   attention.backward_workspace(a, DType::f32, documents.count()),
                   {unset(DType::f32, tokens * row)},
                   [=, &attention, out = noise(DType::f32, tokens * width, 2),
                    lse = noise(DType::f32, tokens * layout.heads(), 3)](kernels::Context& c, Vec<Array>& y) {
                     Array sums = lse;
                     const PackedViews x(qkv, layout);
                     const PackedViews dx(y[0], layout);
                     attention.backward(c, a, x.q, x.k, x.v, view_of(out, heads), sums.f32(),
                                        view_of(out, heads), documents.view(), nullptr, dx.q, dx.k, dx.v);
                   }});
}

void add_embedding(std::vector<Case>& cases) {
  if (!testing::table().embedding) return;
  const auto& embedding = *testing::table().embedding;
  for (const int64_t rows : {5, 700}) {
    const int64_t cols = 37, here = 11;
    cases.push_back({"embedding backward",
                     embedding.backward_workspace(rows, cols, here),
                     {unset(DType::f32, here * cols)},
                     [=, &embedding, ids = random_ints(rows, 1, 2 * here),
                      dout = noise(DType::f32, rows * cols)](kernels::Context& c, Vec<Array>& y) {
                       embedding.backward(c, dout, ids.data(), y[0].f32(), rows, cols, 3, here);
                     }});
  }
}

void add_experts(std::vector<Case>& cases) {
  if (!testing::table().expert_permutation) return;
  const auto& expert_permutation = *testing::table().expert_permutation;
  for (const int64_t tokens : {5, 700}) {
    const kernels::PermutationShape s{.tokens = tokens, .topk = 1, .experts = 3, .capacity = tokens / 4};
    cases.push_back(
        {"plan of experts",
         expert_permutation.plan_workspace(s),
         {unset(DType::f32, 2 * (1 + s.experts)), unset(DType::f32, s.slots()), unset(DType::f32, s.rows())},
         [=, &expert_permutation, experts = random_ints(tokens, 1, s.experts),
          p = Array(DType::f32, random_values(tokens, 2))](kernels::Context& c, Vec<Array>& y) {
           Array probabilities = p;
           expert_permutation.plan(
               c, s, experts.data(), probabilities.f32(), reinterpret_cast<int64_t*>(y[0].f32()),
               reinterpret_cast<int32_t*>(y[1].f32()), reinterpret_cast<int32_t*>(y[2].f32()));
         }});
  }
}

void add_attention(std::vector<Case>& cases) {
  if (!testing::table().attention) return;
  const auto& attention = *testing::table().attention;
  for (const DType type : kTypes)
    for (const int64_t seq : {1, 33, 150}) {
      const kernels::AttentionShape a = attention_shape(2, 2, 24, 2, seq);
      const kernels::QkvLayout layout{2, 2, 24};
      const kernels::HeadStrides heads = contiguous_heads(2, 2, 24);
      const int64_t tokens = a.batch * seq, width = layout.heads() * 24, row = layout.row();
      const Array qkv = noise(type, tokens * row);
      cases.push_back({"attention forward",
                       attention.forward_workspace(a, type, 0),
                       {unset(type, tokens * width), unset(DType::f32, tokens * layout.heads())},
                       [=, &attention](kernels::Context& c, Vec<Array>& y) {
                         const PackedViews x(qkv, layout);
                         attention.forward(c, a, x.q, x.k, x.v, {}, nullptr, view_of(y[0], heads),
                                           y[1].f32());
                       }});
      cases.push_back(
          {"attention backward",
           attention.backward_workspace(a, type, 0),
           {unset(type, tokens * row)},
           [=, &attention, out = noise(type, tokens * width, 2),
            lse = noise(DType::f32, tokens * layout.heads(), 3)](kernels::Context& c, Vec<Array>& y) {
             Array sums = lse;
             const PackedViews x(qkv, layout);
             const PackedViews dx(y[0], layout);
             attention.backward(c, a, x.q, x.k, x.v, view_of(out, heads), sums.f32(), view_of(out, heads), {},
                                nullptr, dx.q, dx.k, dx.v);
           }});
      for (const int32_t past : {0, 40}) {
        // Full, and with memory that this step does not use.
        const int64_t capacity = 40 + seq, cache = a.batch * 2 * capacity * 24;
        cases.push_back({"attention decode",
                         attention.decode_workspace(a, type, capacity),
                         {unset(type, tokens * width), noise(type, cache, 4), noise(type, cache, 5)},
                         [=, &attention](kernels::Context& c, Vec<Array>& y) {
                           const PackedViews x(qkv, layout);
                           attention.decode(c, a, x.q, x.k, x.v, y[1].out(), y[2].out(), &past, capacity,
                                            view_of(y[0], heads), nullptr);
                         }});
      }
    }
}

void add_context_attention(std::vector<Case>& cases) {
  if (!testing::table().context_attention) return;
  const auto& context_attention = *testing::table().context_attention;
  kernels::AttentionBlock block;
  block.shape = attention_shape(2, 2, 24, 2, 80);
  block.shape.v_dim = 19;
  block.queries.segments = {{{0, 30}, {90, 50}}};
  block.keys.segments = {{{0, 37}, {60, 20}}};
  const int64_t queries = 2 * 80, keys = 2 * 57;
  const kernels::HeadStrides of_q = contiguous_heads(2, 2, 24), of_out = contiguous_heads(2, 2, 19),
                             of_kv = contiguous_heads(2, 1, 24 + 19);
  const Array q = noise(DType::f32, queries * of_q.token), kv = noise(DType::f32, keys * of_kv.token, 2);
  cases.push_back({"context_attention forward",
                   context_attention.forward_workspace(block, 0),
                   {unset(DType::f32, queries * of_out.token), unset(DType::f32, queries * 4)},
                   [=, &context_attention](kernels::Context& c, Vec<Array>& y) {
                     context_attention.forward(c, block, view_of(q, of_q), view_of(kv, of_kv),
                                               view_of(kv, of_kv, 24), {}, nullptr, false,
                                               view_of(y[0], of_out), y[1].f32());
                   }});
  cases.push_back({"context_attention backward",
                   context_attention.backward_workspace(block, 0),
                   {unset(DType::f32, queries * of_q.token), unset(DType::f32, keys * of_kv.token)},
                   [=, &context_attention, out = noise(DType::f32, queries * of_out.token, 3),
                    lse = noise(DType::f32, queries * 4, 4)](kernels::Context& c, Vec<Array>& y) {
                     Array sums = lse;
                     context_attention.backward(c, block, view_of(q, of_q), view_of(kv, of_kv),
                                                view_of(kv, of_kv, 24), view_of(out, of_out), sums.f32(),
                                                view_of(out, of_out), {}, nullptr, view_of(y[0], of_q),
                                                view_of(y[1], of_kv), view_of(y[1], of_kv, 24));
                   }});
}

void add_rope(std::vector<Case>& cases) {
  if (!testing::table().rope) return;
  const auto& rope = *testing::table().rope;
  for (const int64_t rows : {1, 900}) {
    const kernels::QkvLayout layout{2, 2, 20};
    const kernels::RopeShape shape{.rows = rows,
                                   .groups = 2,
                                   .heads_per_group = 2,
                                   .head_dim = 20,
                                   .norm = kernels::QkNorm::rms,
                                   .eps = 1e-5f};
    const Array qkv = noise(DType::f32, rows * layout.row()),
                dqkv = noise(DType::f32, rows * layout.row(), 2), gamma = noise(DType::f32, 20, 3);
    cases.push_back({"rope backward",
                     rope.backward_workspace(shape, true),
                     {unset(DType::f32, rows * layout.row()), unset(DType::f32, 20)},
                     [=, &rope](kernels::Context& c, Vec<Array>& y) {
                       const PackedViews x(qkv, layout), dy(dqkv, layout);
                       const PackedViews dx(y[0], layout);
                       rope.backward(c, shape, dy.q, dy.k, x.q, x.k, {}, {.q_gamma = gamma, .k_gamma = gamma},
                                     dx.q, dx.k, {.k_gamma = y[1].f32()});
                     }});
  }
}

void add_decoding(std::vector<Case>& cases) {
  if (!testing::table().decoding) return;
  const auto& decoding = *testing::table().decoding;
  const int64_t rows = 5, cols = 117;
  for (const int64_t top_k : {0, 7}) {
    const kernels::SamplingOptions options{.top_k = top_k};
    cases.push_back(
        {"sample",
         decoding.sample_workspace(options, rows, cols),
         {unset(DType::f32, rows)},
         [=, &decoding, logits = noise(DType::f32, rows * cols)](kernels::Context& c, Vec<Array>& y) {
           Array x = logits;
           const int32_t position = 3;
           decoding.sample(c, options, x.f32(), rows, cols, cols, &position,
                           reinterpret_cast<int32_t*>(y[0].f32()));
         }});
  }
}

void add_norms(std::vector<Case>& cases) {
  if (!testing::table().norm) return;
  const auto& norm = *testing::table().norm;
  const Array none;
  for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {17, 257}, {900, 40}}) {
    const kernels::NormRows layout{rows, cols, 1, 0, cols};
    const Array x = noise(DType::f32, rows * cols), gamma = noise(DType::f32, cols, 2),
                stats = noise(DType::f32, rows, 3);
    cases.push_back({"norm forward",
                     norm.forward_workspace(layout),
                     {unset(DType::f32, rows * cols), unset(DType::f32, rows), unset(DType::f32, rows)},
                     [=, &norm](kernels::Context& c, Vec<Array>& y) {
                       norm.forward(c, false, layout, x, {}, {}, gamma, 0, gamma, 1e-5f, y[0].out(),
                                    y[1].f32(), y[2].f32(), {});
                     }});
    for (const bool gradients : {false, true})
      cases.push_back({"norm backward",
                       norm.backward_workspace(layout, gradients),
                       {unset(DType::f32, rows * cols), unset(DType::f32, cols)},
                       [=, &norm](kernels::Context& c, Vec<Array>& y) {
                         Array mean = stats, rstd = stats;
                         norm.backward(c, false, layout, x, x, gamma, 0, mean.f32(), rstd.f32(), y[0].out(),
                                       false, gradients ? y[1].f32() : nullptr, nullptr);
                       }});
  }
  if (!testing::table().head_norm) return;
  const auto& head_norm = *testing::table().head_norm;
  kernels::HeadNormShape shape;
  shape.qkv = {2, 2, 20}, shape.rows = 130, shape.query_cols = 80, shape.key_cols = 40, shape.eps = 1e-5f;
  const int64_t n = shape.rows * shape.qkv.row();
  const Array qkv = noise(DType::f32, n), queries = noise(DType::f32, 80, 2), keys = noise(DType::f32, 40, 3),
              pairs(DType::f32, Vec<double>(260, 0.5));
  cases.push_back({"head_norm forward",
                   head_norm.forward_workspace(shape),
                   {unset(DType::f32, n)},
                   [=, &head_norm](kernels::Context& c, Vec<Array>& y) {
                     Array squares = pairs;
                     head_norm.forward(c, shape, qkv, squares.f32(), queries, keys, y[0].out());
                   }});
  cases.push_back({"head_norm dots",
                   head_norm.dots_workspace(shape),
                   {unset(DType::f32, 260)},
                   [=, &head_norm](kernels::Context& c, Vec<Array>& y) {
                     Array squares = pairs;
                     head_norm.dots(c, shape, qkv, qkv, squares.f32(), queries, keys, y[0].f32());
                   }});
  for (const bool gradients : {false, true})
    cases.push_back({"head_norm backward",
                     head_norm.backward_workspace(shape, gradients),
                     {unset(DType::f32, n), unset(DType::f32, 80), unset(DType::f32, 40)},
                     [=, &head_norm](kernels::Context& c, Vec<Array>& y) {
                       Array squares = pairs;
                       head_norm.backward(c, shape, qkv, qkv, squares.f32(), squares.f32(), queries, keys,
                                          y[0].out(), gradients ? y[1].f32() : nullptr,
                                          gradients ? y[2].f32() : nullptr);
                     }});
}

void add_rows(std::vector<Case>& cases) {
  if (!testing::table().activation) return;
  const auto& activation = *testing::table().activation;
  const auto kind = kernels::ActivationKind::silu;
  const int64_t rows = 9, cols = 37;
  for (const bool gated : {false, true}) {
    const int64_t width = gated ? 2 * cols : cols;
    const Array x = noise(DType::f32, rows * width), bias = noise(DType::f32, width, 2),
                dy = noise(DType::f32, rows * cols, 3);
    cases.push_back({"activation forward",
                     activation.forward_workspace(gated, true, cols),
                     {unset(DType::f32, rows * cols)},
                     [=, &activation](kernels::Context& c, Vec<Array>& y) {
                       activation.forward(c, kind, gated, x, bias, y[0].out(), rows, cols, {});
                     }});
    cases.push_back({"activation backward",
                     activation.backward_workspace(gated, true, cols),
                     {unset(DType::f32, rows * width)},
                     [=, &activation](kernels::Context& c, Vec<Array>& y) {
                       activation.backward(c, kind, gated, dy, x, bias, y[0].out(), rows, cols);
                     }});
  }
  const auto& elementwise = *testing::table().elementwise;
  const Array x = noise(DType::f32, rows * cols), bias = noise(DType::f32, cols, 2);
  cases.push_back({"bias_dropout_add",
                   elementwise.bias_dropout_add_workspace(true, cols),
                   {unset(DType::f32, rows * cols)},
                   [=, &elementwise](kernels::Context& c, Vec<Array>& y) {
                     elementwise.bias_dropout_add(c, x, bias, {}, y[0].out(), rows, cols, 0, {}, nullptr);
                   }});
  for (const int64_t n : {1, 100000}) {
    const Array values = noise(DType::f32, n);
    const auto f64 = [](Array& y) { return reinterpret_cast<double*>(y.f32()); };
    cases.push_back({"sum",
                     elementwise.sum_workspace(n),
                     {unset(DType::f32, 2)},
                     [=, &elementwise](kernels::Context& c, Vec<Array>& y) {
                       elementwise.sum(c, values, n, f64(y[0]), false);
                     }});
    cases.push_back({"weighted_sum",
                     elementwise.weighted_sum_workspace(n),
                     {unset(DType::f32, 2)},
                     [=, &elementwise](kernels::Context& c, Vec<Array>& y) {
                       Array a = values;
                       elementwise.weighted_sum(c, a.f32(), a.f32(), n, f64(y[0]), false);
                     }});
    cases.push_back({"count_nonfinite",
                     elementwise.count_nonfinite_workspace(n),
                     {unset(DType::f32, 2)},
                     [=, &elementwise](kernels::Context& c, Vec<Array>& y) {
                       elementwise.count_nonfinite(c, values, n, reinterpret_cast<int64_t*>(y[0].f32()),
                                                   false);
                     }});
  }
}

void add_adapters(std::vector<Case>& cases) {
  if (!testing::table().adapter) return;
  const auto& adapter = *testing::table().adapter;
  const int64_t out = 70, in = 33, rank = 5;
  const Array w = noise(DType::f32, out * in), p = noise(DType::f32, out * rank, 2),
              b = noise(DType::f32, out * rank, 3), g = noise(DType::f32, rank * rank, 4),
              lengths(DType::f32, Vec<double>(static_cast<size_t>(in), 2.0));
  cases.push_back({"row_lengths",
                   adapter.row_lengths_workspace(rank),
                   {unset(DType::f32, out)},
                   [=, &adapter](kernels::Context& c, Vec<Array>& y) {
                     Array projected = p, gram = g;
                     adapter.row_lengths(c, w, projected.f32(), b, gram.f32(), 0.5f, y[0].f32(), out, in,
                                         rank);
                   }});
  cases.push_back({"scale_columns",
                   adapter.scale_columns_workspace(in),
                   {unset(DType::f32, out * in)},
                   [=, &adapter](kernels::Context& c, Vec<Array>& y) {
                     Array squares = lengths;
                     adapter.scale_columns(c, w, lengths, squares.f32(), y[0].out(), out, in);
                   }});
  cases.push_back({"magnitude_gradient",
                   adapter.magnitude_gradient_workspace(),
                   {unset(DType::f32, in)},
                   [=, &adapter](kernels::Context& c, Vec<Array>& y) {
                     Array squares = lengths;
                     adapter.magnitude_gradient(c, w, w, squares.f32(), y[0].f32(), out, in);
                   }});
}

void add_optimizers(std::vector<Case>& cases) {
  if (!testing::table().optimizers) return;
  const auto& optimizers = *testing::table().optimizers;
  using kernels::UpdateRange;
  const int64_t n = 140000;
  const Vec<UpdateRange> ranges{
      {.begin = 0, .count = 5}, {.begin = 64, .count = 32768}, {.begin = 40000, .count = 99999}};
  const auto table = [ranges] { return kernels::In{ranges.data(), DType::u8}; };
  const auto count = static_cast<int64_t>(ranges.size());
  const Array gradient = noise(DType::f32, n), moment = noise(DType::f32, n, 2);
  const WorkspaceSize update = optimizers.update_workspace(count);
  // On the heap, which a GPU reads (gpu_table.cpp).
  const Vec<kernels::StepControl> control(1);
  cases.push_back(
      {"adam", update, {unset(DType::f32, n)}, [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
         Array m = moment, v = Array::zeros(DType::f32, n, 1);
         optimizers.adam(c, {.scale = {.lr = 1}, .eps = 1}, kernels::In{control.data(), DType::u8}, table(),
                         count, gradient, y[0].out(), m.out(), nullptr, v.out(), nullptr, {});
       }});
  cases.push_back(
      {"sgd", update, {unset(DType::f32, n)}, [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
         Array g = gradient;
         optimizers.sgd(c, {.scale = {.lr = 1}}, kernels::In{control.data(), DType::u8}, table(), count,
                        g.f32(), y[0].f32(), nullptr, {});
       }});
  cases.push_back(
      {"lion", update, {unset(DType::f32, n)}, [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
         Array g = gradient, m = moment;
         optimizers.lion(c, {.scale = {.lr = 1}}, kernels::In{control.data(), DType::u8}, table(), count,
                         g.f32(), y[0].f32(), m.f32(), {});
       }});
  cases.push_back({"muon_momentum", update, {gradient}, [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
                     Array main = gradient, buffer = moment;
                     optimizers.muon_momentum(c, {.momentum = 0.5f}, kernels::In{control.data(), DType::u8},
                                              table(), count, y[0].f32(), main.f32(), buffer.f32());
                   }});
  cases.push_back(
      {"muon_update", update, {unset(DType::f32, n)}, [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
         Array g = gradient;
         optimizers.muon_update(c, {.lr = 1}, kernels::In{control.data(), DType::u8}, table(), count, g.f32(),
                                y[0].f32(), {});
       }});
  const int64_t elements = 5 + 32768 + 99999;
  cases.push_back({"sum_of_squares",
                   optimizers.sum_of_squares_workspace(count, elements),
                   {unset(DType::f32, 2)},
                   [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
                     optimizers.sum_of_squares(c, table(), count, gradient,
                                               reinterpret_cast<double*>(y[0].f32()), false);
                   }});
  cases.push_back({"count_zeros",
                   optimizers.count_zeros_workspace(count, elements),
                   {unset(DType::f32, 2)},
                   [=, &optimizers](kernels::Context& c, Vec<Array>& y) {
                     optimizers.count_zeros(c, table(), count, gradient,
                                            reinterpret_cast<int64_t*>(y[0].f32()), false);
                   }});
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_gemms(cases);
  add_attention(cases);
  add_attention_of_documents(cases);
  add_embedding(cases);
  add_experts(cases);
  add_context_attention(cases);
  add_rope(cases);
  add_decoding(cases);
  add_norms(cases);
  add_rows(cases);
  add_adapters(cases);
  add_optimizers(cases);
  return cases;
}

}  // namespace

TEST_CASE("a kernel stays within the workspace that its family declares, and refuses less") {
  for (const Case& kernel : all_cases())
    for (const int threads : {1, 3}) {
      if (test::kSanitized && threads == 1) continue;
      INFO(kernel.name, " with ", threads, " threads");
      const size_t bytes = kernel.need.total(threads);
      if (bytes == 0) {  // on the CPU all but this one have one
        CHECK((kernel_folder() != "kernels/cpu/" || kernel.name == "embedding backward"));
        continue;
      }
      const auto untouched = [&](const Vec<Array>& outputs, size_t i) {
        return outputs[i].bytes() == kernel.outputs[i].bytes();
      };
      {
        // Its destructor checks the sentinel bytes.
        Launch enough(threads, bytes);
        Vec<Array> outputs = kernel.outputs;
        kernel.run(enough.context(), outputs);
        CHECK(!untouched(outputs, 0));
      }
      Launch small(threads, bytes - 64);
      Vec<Array> outputs = kernel.outputs;
      kernel.run(small.context(), outputs);
      for (size_t i = 0; i < outputs.size(); ++i) CHECK(untouched(outputs, i));
      const kernels::KernelError error = small.take_error();
      REQUIRE(error.file != nullptr);
      CHECK(std::string(error.file).find(kernel_folder()) != std::string::npos);
      CHECK(error.needed == bytes);
      CHECK(error.given == bytes - 64);
    }
}

TEST_CASE("every function of kernels/*.hpp that declares a workspace has a case here") {
  namespace fs = std::filesystem;
  const fs::path root = test::kSourceDirectory;
  const std::string cases = test::slurp(root / "tests/kernels/workspace.cpp");
  const std::regex declared("\\(\\*([a-z_]+_workspace)\\)");
  size_t found = 0;
  for (const auto& header : fs::directory_iterator(root / "kernels")) {
    if (header.path().extension() != ".hpp") continue;
    const std::string text = test::slurp(header.path());
    for (std::sregex_iterator it(text.begin(), text.end(), declared), end; it != end; ++it, ++found) {
      const std::string call = header.path().stem().string() + "." + (*it)[1].str() + "(";
      CHECK_MESSAGE(cases.find(call) != std::string::npos, call);
    }
  }
  CHECK(found >= 29);
}

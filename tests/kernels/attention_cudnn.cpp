// Attention by cuDNN on simulated GPUs: values and gradients, the choice by table, workspaces, and what stays
// with the own kernels. Plans of the library itself: cudnn_plans.cpp.
#include "kernels/cuda/attention_choice.hpp"
#include "kernels/simulated/cudnn_attention.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/simulated_gpu.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::AttentionPass;
using kernels::AttentionShape;
using kernels::simulated::cudnn_counts;
using kernels::simulated::CudnnAttention;
using kernels::simulated::CudnnUse;
using reference::packed_layout;

namespace {

// Arrays of a call: q in one, k and v in another, at any strides.
struct CudnnCase {
  AttentionShape a;
  kernels::HeadStrides q, kv, out;
  int64_t first_v = 0;
  DType type = DType::bf16;

  // Packed QKV: q, k and v in one array.
  static CudnnCase packed(const AttentionShape& a, DType type) {
    CudnnCase c{.a = a, .type = type};
    c.q = c.kv = packed_layout(a).strides();
    c.out = contiguous_heads(a.groups, a.heads_per_group, a.v_dim);
    c.first_v = packed_layout(a).value(0);
    return c;
  }
  // Separate arrays with gaps, in which the heads of a group are not consecutive.
  static CudnnCase separate(const AttentionShape& a, DType type) {
    CudnnCase c{.a = a, .type = type};
    const int64_t width = a.qk_dim + a.v_dim + 8;
    c.q = {a.heads() * a.qk_dim + 16, a.qk_dim, a.groups * a.qk_dim};
    c.kv = {a.groups * width + 24, width, 0};
    c.out = {a.heads() * (a.v_dim + 8), a.heads_per_group * (a.v_dim + 8), a.v_dim + 8};
    c.first_v = a.qk_dim;
    return c;
  }
  bool is_packed() const { return q.token == kv.token; }
  int64_t first_k() const { return is_packed() ? packed_layout(a).key(0) : 0; }
  int64_t tokens() const { return a.batch * a.seq; }
};

// Everything that attention writes: out, lse, dq, dk and dv (in one array if packed).
struct CudnnResult {
  Vec<Array> arrays;
  bool operator==(const CudnnResult& other) const {
    return std::equal(arrays.begin(), arrays.end(), other.arrays.begin(), other.arrays.end(),
                      [](const Array& x, const Array& y) { return x.bytes() == y.bytes(); });
  }
};

struct CudnnInputs {
  Array q, kv, dout;
  CudnnInputs(const CudnnCase& c, uint64_t seed)
      : q(c.type, random_values(c.tokens() * c.q.token, seed)),
        kv(c.type, random_values(c.tokens() * c.kv.token, seed + 1)),
        dout(c.type, random_values(c.tokens() * c.out.token, seed + 2)) {}
};

CudnnResult run(const CudnnCase& c, const CudnnInputs& x, const kernels::Documents& documents = {}) {
  const kernels::Attention& family = *testing::table().attention;
  const Array& kv = c.is_packed() ? x.q : x.kv;
  const auto ids = dropout_rows(c.tokens());
  const int64_t* const rows = c.a.dropout > 0 ? ids.data() : nullptr;
  auto y = run_kernel({Array::zeros(c.type, c.tokens() * c.out.token, 99),
                       Array::zeros(DType::f32, c.a.batch * c.a.heads() * c.a.seq, NAN)},
                      [&](kernels::Context& context, Vec<Array>& o) {
                        family.forward(context, c.a, view_of(x.q, c.q), view_of(kv, c.kv, c.first_k()),
                                       view_of(kv, c.kv, c.first_v), documents, rows, view_of(o[0], c.out),
                                       o[1].f32());
                      });
  Vec<Array> gradients{Array::zeros(c.type, c.tokens() * c.q.token, 99)};
  if (!c.is_packed()) gradients.push_back(Array::zeros(c.type, c.tokens() * c.kv.token, 99));
  const auto g = run_kernel(gradients, [&](kernels::Context& context, Vec<Array>& o) {
    Array lse = y[1];
    Array& dkv = o.back();
    family.backward(context, c.a, view_of(x.q, c.q), view_of(kv, c.kv, c.first_k()),
                    view_of(kv, c.kv, c.first_v), view_of(y[0], c.out), lse.f32(), view_of(x.dout, c.out),
                    documents, rows, view_of(o[0], c.q), view_of(dkv, c.kv, c.first_k()),
                    view_of(dkv, c.kv, c.first_v));
  });
  y.insert(y.end(), g.begin(), g.end());
  return {y};
}

// Launches of run_kernel() for one call of run(), of each pass.
int64_t launches() {
  return test::kSanitized ? 1 : 4;
}
AttentionShape cudnn_shape(int64_t groups, int64_t per_group, int64_t d, int64_t batch, int64_t seq,
                           int64_t window = 0, bool causal = true) {
  AttentionShape a = attention_shape(groups, per_group, d, batch, seq);
  a.window = window;
  a.causal = causal;
  return a;
}
// Calls of cuDNN for a launch of each pass, on a GPU whose backward pass stores a matrix, or does not. Heads
// of a group that are not next to those of the following one: each sequence is a call.
int64_t calls_of(const CudnnCase& c, bool has_matrix) {
  const bool apart = c.a.groups > 1 && c.a.heads_per_group > 1;
  return (apart ? c.a.batch : 1) + (apart || has_matrix ? c.a.batch : 1);
}

}  // namespace

TEST_CASE("cuDNN: values, lse and gradients of packed heads") {
  uint64_t seed = 3100;
  for (const DType type : {DType::bf16, DType::f16})
    for (const AttentionShape& a :
         {cudnn_shape(3, 1, 16, 2, 37), cudnn_shape(2, 3, 24, 2, 33), cudnn_shape(1, 4, 8, 3, 17),
          cudnn_shape(2, 2, 64, 1, 65, 21), cudnn_shape(2, 2, 16, 2, 29, 29),
          cudnn_shape(2, 2, 16, 2, 41, 0, false)}) {
      INFO("groups=", a.groups, " heads/group=", a.heads_per_group, " d=", a.qk_dim, " batch=", a.batch,
           " seq=", a.seq, " window=", a.window, " causal=", a.causal, " ", text(type));
      const CudnnCase c = CudnnCase::packed(a, type);
      const CudnnInputs x(c, seed++);
      const test::SimulatedGpu gpu(seed % 2 == 0 ? 90 : 100);
      const int64_t before = cudnn_counts().computed;
      const CudnnAttention cudnn(CudnnUse::always);
      const CudnnResult y = run(c, x);
      CHECK(cudnn_counts().computed == before + launches() * calls_of(c, seed % 2 == 0));
      Vec<double> lse;
      const auto ids = dropout_rows(c.tokens());
      const auto expected = reference::attention(a, x.q.rounded(), {}, ids, &lse);
      CHECK(error(y.arrays[0].rounded(), expected) < tolerance(type));
      CHECK(error(y.arrays[1].rounded(), lse) < 1e-5);
      const auto gradient = reference::attention_gradient(a, x.q.rounded(), x.dout.rounded(), {}, ids);
      CHECK(error(y.arrays[2].rounded(), gradient) < 2 * tolerance(type));
    }
}

TEST_CASE("cuDNN: separate views, widths of queries and values that differ") {
  uint64_t seed = 3200;
  for (const auto [groups, per_group] : {std::array<int64_t, 2>{2, 1}, {1, 3}, {2, 3}}) {
    AttentionShape a = cudnn_shape(groups, per_group, 24, 2, 35);
    a.v_dim = 16;
    for (const int64_t window : {0, 9}) {
      a.window = window;
      const CudnnCase c = CudnnCase::separate(a, DType::bf16);
      const CudnnInputs x(c, seed++);
      const CudnnResult own = run(c, x);
      const int64_t before = cudnn_counts().computed;
      const CudnnAttention cudnn(CudnnUse::always);
      const CudnnResult y = run(c, x);
      CHECK(cudnn_counts().computed == before + launches() * calls_of(c, true));
      for (size_t i = 0; i < y.arrays.size(); ++i) {
        INFO("array ", i, " groups=", groups, " heads/group=", per_group, " window=", window);
        // The gaps hold the same values, too.
        CHECK(error(y.arrays[i].rounded(), own.arrays[i].rounded()) < 2 * tolerance(DType::bf16));
      }
    }
  }
}

TEST_CASE("cuDNN: a backward pass whose matrix is large computes some groups of heads at a time") {
  const test::SimulatedGpu gpu(90);
  uint64_t seed = 3230;
  for (const CudnnCase& c : {CudnnCase::packed(cudnn_shape(4, 3, 16, 2, 37), DType::bf16),
                             CudnnCase::packed(cudnn_shape(6, 1, 16, 2, 37), DType::f16),
                             CudnnCase::separate(cudnn_shape(4, 2, 24, 2, 35), DType::bf16)}) {
    const CudnnInputs x(c, seed++);
    const CudnnResult own = run(c, x);
    const int64_t of_group = kernels::cudnn_matrix_bytes(90, AttentionPass::backward, c.a);
    // A matrix for three groups, of which a divisor of their number is taken, and for less than one.
    for (const auto [most, groups] :
         {std::array<int64_t, 2>{3 * of_group, c.a.groups == 6 ? 3 : 2}, {1, 1}}) {
      INFO("groups=", c.a.groups, " heads/group=", c.a.heads_per_group, ", ", groups, " at a time");
      const CudnnAttention cudnn(CudnnUse::always, 0, false, most);
      const int64_t before = cudnn_counts().computed;
      const CudnnResult y = run(c, x);
      const int64_t forward = c.a.heads_per_group > 1 ? c.a.batch : 1,
                    backward = c.a.batch * c.a.groups / groups;
      // The forward pass has no matrix.
      CHECK(cudnn_counts().computed == before + launches() * (forward + backward));
      for (size_t i = 0; i < y.arrays.size(); ++i)
        CHECK(error(y.arrays[i].rounded(), own.arrays[i].rounded()) < 2 * tolerance(c.type));
    }
  }
}

TEST_CASE("cuDNN: gradients of attention with sinks, which have changed out and lse before") {
  const AttentionShape a = cudnn_shape(2, 2, 16, 2, 37, 12);
  const CudnnCase c = CudnnCase::packed(a, DType::bf16);
  const CudnnInputs x(c, 3250);
  const Array logits(DType::f32, random_values(a.heads(), 3260));
  const kernels::Attention& family = *testing::table().attention;
  const auto gradient = [&] {
    return run_kernel(
        {Array::zeros(c.type, c.tokens() * c.q.token, 99)}, [&](kernels::Context& context, Vec<Array>& o) {
          Array out = Array::zeros(c.type, c.tokens() * c.out.token),
                lse = Array::zeros(DType::f32, a.batch * a.heads() * a.seq);
          const auto q = view_of(x.q, c.q), k = view_of(x.q, c.kv, c.first_k()),
                     v = view_of(x.q, c.kv, c.first_v);
          family.forward(context, a, q, k, v, {}, nullptr, view_of(out, c.out), lse.f32());
          testing::table().attention_sink->forward(context, a, logits, view_of(out, c.out), lse.f32());
          family.backward(context, a, q, k, v, view_of(out, c.out), lse.f32(), view_of(x.dout, c.out), {},
                          nullptr, view_of(o[0], c.q), view_of(o[0], c.kv, c.first_k()),
                          view_of(o[0], c.kv, c.first_v));
        })[0];
  };
  const Array own = gradient();
  const int64_t before = cudnn_counts().computed;
  const CudnnAttention cudnn(CudnnUse::always);
  CHECK(error(gradient().rounded(), own.rounded()) < 2 * tolerance(c.type));
  CHECK(cudnn_counts().computed > before);
}

TEST_CASE("cuDNN: what its graphs do not express stays with the own kernels") {
  const AttentionShape plain = cudnn_shape(2, 2, 16, 1, 33);
  Vec<std::pair<const char*, CudnnCase>> cases;
  const auto add = [&](const char* name, const auto& change) {
    CudnnCase c = CudnnCase::packed(plain, DType::bf16);
    change(c);
    cases.emplace_back(name, c);
  };
  add("fp32", [](CudnnCase& c) { c.type = DType::f32; });
  add("dropout", [](CudnnCase& c) { c.a.dropout = 0.2f; });
  add("softcap", [](CudnnCase& c) { c.a.softcap = 2.0f; });
  add("a window that looks ahead", [](CudnnCase& c) { c.a.causal = false, c.a.window = 5; });
  add("heads of 20", [](CudnnCase& c) { c = CudnnCase::packed(cudnn_shape(2, 2, 20, 1, 33), c.type); });
  add("a stride of 2 bytes too many", [](CudnnCase& c) {
    c = CudnnCase::separate(c.a, c.type);
    c.q.token += 1;
  });
  uint64_t seed = 3300;
  for (const auto& [name, c] : cases) {
    INFO(name);
    const CudnnInputs x(c, seed++);
    const CudnnResult own = run(c, x);
    const auto before = cudnn_counts();
    const CudnnAttention cudnn(CudnnUse::always);
    CHECK(run(c, x) == own);
    // A stride of the queries' only: the forward pass is the case's.
    CHECK(cudnn_counts().computed == before.computed);
    CHECK(cudnn_counts().refused == before.refused);
  }
  const CudnnCase c = CudnnCase::packed(plain, DType::bf16);
  const CudnnInputs x(c, seed++);
  Vec<int32_t> starts(33, 0);
  std::fill(starts.begin() + 20, starts.end(), 20);
  const Vec<int32_t> bounds = document_bounds(starts, 33);
  for (const bool cumulative : {false, true}) {
    const CudnnResult own = run(c, x, packing_of(starts, bounds, cumulative));
    const int64_t before = cudnn_counts().computed;
    const CudnnAttention cudnn(CudnnUse::always);
    CHECK(run(c, x, packing_of(starts, bounds, cumulative)) == own);
    CHECK(cudnn_counts().computed == before);
  }
}

TEST_CASE("cuDNN: calls without a plan, and plans that need more workspace, fall back to the own kernels") {
  const CudnnCase c = CudnnCase::packed(cudnn_shape(2, 2, 16, 2, 33), DType::f16);
  const CudnnInputs x(c, 3400);
  const CudnnResult own = run(c, x);
  const auto falls_back = [&](const CudnnAttention&) {
    const auto before = cudnn_counts();
    CHECK(run(c, x) == own);
    CHECK(cudnn_counts().computed == before.computed);
    CHECK(cudnn_counts().refused == before.refused + 2 * launches());
  };
  falls_back(CudnnAttention(CudnnUse::always, 0, true));
  falls_back(CudnnAttention(CudnnUse::always, workspace_bytes()));
  {
    const test::SimulatedGpu old(75);
    falls_back(CudnnAttention(CudnnUse::always));
  }
  // A GPU that plans the forward pass of these heads, but not the backward pass.
  const test::SimulatedGpu ampere(80);
  const CudnnCase wide = CudnnCase::packed(cudnn_shape(1, 1, 192, 1, 33), DType::bf16);
  const CudnnInputs y(wide, 3500);
  const auto before = cudnn_counts();
  const CudnnAttention cudnn(CudnnUse::always);
  run(wide, y);
  CHECK(cudnn_counts().computed == before.computed + launches());
  CHECK(cudnn_counts().refused == before.refused + launches());
}

TEST_CASE("cuDNN: the choice by table") {
  const auto chosen = [](int capability, AttentionPass pass, int64_t qk, int64_t v, int64_t seq,
                         int64_t heads, int64_t window = 0) {
    AttentionShape a = cudnn_shape(heads, 1, qk, 1, seq, window);
    a.v_dim = v;
    return kernels::prefers_cudnn(capability, pass, a);
  };
  constexpr auto forward = AttentionPass::forward, backward = AttentionPass::backward;
  for (const int capability : {90, 100, 103}) {
    CHECK(chosen(capability, forward, 64, 64, 4096, 32));
    CHECK(chosen(capability, forward, 128, 128, 512, 32));
    CHECK(chosen(capability, forward, 192, 128, 4096, 32));
    CHECK_FALSE(chosen(capability, forward, 128, 128, 4097, 32));
    CHECK_FALSE(chosen(capability, forward, 128, 128, 256, 32));
    CHECK_FALSE(chosen(capability, forward, 256, 256, 4096, 32));
    CHECK(chosen(capability, backward, 128, 128, 4096, 32));
    CHECK(chosen(capability, backward, 128, 128, 4096, 32, 4096));
    CHECK(chosen(capability, forward, 128, 128, 4096, 32, 1024));
    CHECK(chosen(capability, backward, 128, 128, 4096, 32, 1024) == (capability >= 100));
    CHECK(chosen(capability, backward, 64, 64, 4096, 32) == (capability >= 100));
    // The matrix of a head takes 1 GiB at 23168 tokens; the heads take turns.
    CHECK(chosen(capability, backward, 128, 128, 8192, 64));
    CHECK(chosen(capability, backward, 128, 128, 23040, 64));
    CHECK(chosen(capability, backward, 128, 128, 23296, 64) == (capability >= 100));
  }
  for (const int capability : {80, 86, 89, 110, 120})
    for (const AttentionPass pass : {forward, backward})
      CHECK_FALSE(chosen(capability, pass, 128, 128, 4096, 32));
}

TEST_CASE("cuDNN: the table decides for a call and for its workspace; without it nothing changes") {
  const kernels::Attention& family = *testing::table().attention;
  const AttentionShape a = cudnn_shape(1, 2, 64, 1, 512);
  const auto needs = [&](DType type, int64_t documents) {
    return std::array{family.forward_workspace(a, type, documents).shared,
                      family.backward_workspace(a, type, documents).shared};
  };
  const auto own = needs(DType::bf16, 0);
  CHECK(own[0] == 0);
  const CudnnAttention cudnn(CudnnUse::by_table);
  for (const int capability : {80, 90, 100}) {
    const test::SimulatedGpu gpu(capability);
    CHECK((needs(DType::bf16, 0)[0] > 0) == (capability > 80));
    CHECK((needs(DType::bf16, 0)[1] > own[1]) == (capability == 100));
    CHECK(needs(DType::f32, 0) == own);
    CHECK(needs(DType::bf16, 2) == own);
  }
  const CudnnCase c = CudnnCase::packed(a, DType::bf16);
  const CudnnInputs x(c, 3600);
  const test::SimulatedGpu blackwell(100);
  const int64_t before = cudnn_counts().computed;
  run(c, x);
  CHECK(cudnn_counts().computed == before + 2 * launches());
}

TEST_CASE("cuDNN: the declared workspace covers what its plans need, and calls with less fall back") {
  const kernels::Attention& family = *testing::table().attention;
  const CudnnAttention cudnn(CudnnUse::always);
  for (const int capability : {80, 90, 100})
    for (const AttentionShape& a : {cudnn_shape(2, 2, 16, 2, 33), cudnn_shape(3, 1, 24, 2, 130)}) {
      const test::SimulatedGpu gpu(capability);
      const CudnnCase c = CudnnCase::packed(a, DType::bf16);
      const CudnnInputs x(c, 3700);
      for (const size_t missing : {size_t{0}, size_t{2048}}) {
        const size_t bytes = family.forward_workspace(a, c.type, 0).total(1);
        Launch launch(1, bytes - std::min(bytes, missing));
        Array out = Array::zeros(c.type, c.tokens() * c.out.token, NAN),
              lse = Array::zeros(DType::f32, a.batch * a.heads() * a.seq, NAN);
        const int64_t before = cudnn_counts().computed;
        family.forward(launch.context(), a, view_of(x.q, c.q), view_of(x.q, c.kv, c.first_k()),
                       view_of(x.q, c.kv, c.first_v), {}, nullptr, view_of(out, c.out), lse.f32());
        CHECK((cudnn_counts().computed > before) == (missing == 0));
        CHECK(error(lse.rounded(), lse.rounded()) == 0);
        Launch other(1, family.backward_workspace(a, c.type, 0).total(1) - missing);
        Array gradient = Array::zeros(c.type, c.tokens() * c.q.token, NAN);
        const int64_t computed = cudnn_counts().computed;
        family.backward(other.context(), a, view_of(x.q, c.q), view_of(x.q, c.kv, c.first_k()),
                        view_of(x.q, c.kv, c.first_v), view_of(out, c.out), lse.f32(), view_of(x.dout, c.out),
                        {}, nullptr, view_of(gradient, c.q), view_of(gradient, c.kv, c.first_k()),
                        view_of(gradient, c.kv, c.first_v));
        CHECK((cudnn_counts().computed > computed) == (missing == 0));
        const kernels::KernelError failure = other.take_error();
        CHECK((failure.file != nullptr) == (missing > 0));
      }
    }
}

TEST_CASE("cuDNN: calls that would be undefined on a GPU are reported") {
  using kernels::simulated::CudnnCall;
  using kernels::simulated::CudnnPointers;
  alignas(256) static std::byte memory[1 << 15];
  const auto report = [&](const auto& plant) {
    CudnnCall call{.sequences = 1, .heads = 1, .key_heads = 1, .seq = 9, .qk_dim = 8, .v_dim = 8, .scale = 1};
    call.q = call.k = call.v = call.out = {72, 72, 8};
    CudnnPointers p{.q = memory, .k = memory + 512, .v = memory + 1024};
    p.out = memory + 2048, p.lse = memory + 4096;
    p.workspace = memory + 8192, p.workspace_bytes = 4096;
    plant(call, p);
    Launch launch(1);
    CHECK(kernels::simulated::enqueue_cudnn(launch.context(), call, p));
    const char* const reason = launch.take_error().reason;
    return std::string(reason ? reason : "");
  };
  CHECK(report([](CudnnCall&, CudnnPointers&) {}) == "");
  CHECK(report([](CudnnCall& c, CudnnPointers&) { c.type = DType::f32; }).find("bf16 and fp16") !=
        std::string::npos);
  CHECK(report([](CudnnCall& c, CudnnPointers&) { c.k.token = 9; }).find("stride") != std::string::npos);
  CHECK(report([](CudnnCall&, CudnnPointers& p) { p.v = memory + 1026; }).find("not aligned to 16") !=
        std::string::npos);
  CHECK(report([](CudnnCall&, CudnnPointers& p) { p.out = nullptr; }).find("missing") != std::string::npos);
  CHECK(report([](CudnnCall&, CudnnPointers& p) { p.lse = nullptr; }).find("lse") != std::string::npos);
  CHECK(report([](CudnnCall&, CudnnPointers& p) { p.workspace = memory + 8200; }).find("workspace") !=
        std::string::npos);
}

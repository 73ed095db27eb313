// Kernels that take indices from device memory, at real sizes with real indices: a step of a recipe on a
// sampled device (tests/train/real_sizes.cpp) reads zeros. Arrays of more than 2^31 elements.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/division.hpp"
#include "kernels/simulated/table.hpp"
#include "kernels/table.hpp"
#include "support/child.hpp"
#include "support/sampled_device.hpp"
#include "tensor/launch.hpp"

using namespace capstan;

namespace {

const kernels::Table& families() {
  return kernels::simulated_table();
}

// Runs `body` with a sampled device, and reports its faults.
void check_sizes(FunctionRef<void(test::SampledDevice&)> body,
                 const kernels::simulated::Sample& sample = {}) {
  const test::ChildResult result = test::run_in_child([&] {
    test::SampledDevice device(sample);
    device.report_faults();
    body(device);
  });
  CHECK_MESSAGE(result.succeeded, result.text);
}

// A tensor of indices(i), which the host writes where the device has it.
template <class T, class Indices>
Tensor filled(test::SampledDevice& device, int64_t count, const Indices& indices) {
  const Tensor result = Tensor::empty(device, {count}, DTypeOf<T>::value);
  auto* const values = reinterpret_cast<T*>(result.address());
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(indices(i));
  return result;
}
float* floats(const Tensor& t) {
  return reinterpret_cast<float*>(t.address());
}
const int32_t* integers(const Tensor& t) {
  return reinterpret_cast<const int32_t*>(t.address());
}
kernels::Out out_of(const Tensor& t) {
  return {t.address(), t.dtype()};
}

// Launches a kernel on raw addresses.
template <class... P>
void run(test::SampledDevice& device, kernels::WorkspaceSize size, void (*kernel)(kernels::Context&, P...),
         std::type_identity_t<P>... arguments) {
  const LaunchWorkspace workspace(device, Queue::compute, size);
  call_kernel(workspace.context(), kernel, arguments...);
}

}  // namespace

// 65536 tokens with 8 of 256 experts, all of which have as many rows.
TEST_CASE("real sizes: rows of experts") {
  check_sizes([](test::SampledDevice& device) {
    constexpr int64_t kTokens = 65536, kTopk = 8, kExperts = 256, kSlots = kTokens * kTopk, kCols = 7168,
                      kEach = kSlots / kExperts;
    const kernels::ExpertPermutation& family = *families().expert_permutation;
    const Tensor experts = filled<int32_t>(device, kSlots, [](int64_t slot) { return slot % kExperts; });
    // The plan, as it is without a sample.
    const Tensor sizes = filled<int64_t>(device, kExperts, [](int64_t) { return kEach; });
    const Tensor row_of_slot = filled<int32_t>(
        device, kSlots, [](int64_t slot) { return slot % kExperts * kEach + slot / kExperts; });
    const Tensor slot_of_row =
        filled<int32_t>(device, kSlots, [](int64_t row) { return row % kEach * kExperts + row / kEach; });
    const Tensor x = Tensor::empty(device, {kTokens, kCols}, DType::bf16),
                 rows = Tensor::empty(device, {kSlots, kCols}, DType::bf16),
                 weights = Tensor::empty(device, {kSlots}), sums = Tensor::empty(device, {kExperts, kCols});
    for (const kernels::PermutationShape& s :
         {kernels::PermutationShape{.tokens = kTokens, .topk = kTopk, .experts = kExperts},
          kernels::PermutationShape{.tokens = kTokens,
          .topk = kTopk,
          .experts = kExperts,
          .capacity = kEach,
          .policy = kernels::DropPolicy::probability,
          .pad = true}}) {
      const Tensor numbers = Tensor::zeros(device, {1 + kExperts}, DType::i64),
                   of_slot = Tensor::zeros(device, {kSlots}, DType::i32),
                   of_row = Tensor::zeros(device, {s.rows()}, DType::i32);
      run(device, family.plan_workspace(s), family.plan, s, integers(experts), floats(weights),
          reinterpret_cast<int64_t*>(numbers.address()), reinterpret_cast<int32_t*>(of_slot.address()),
          reinterpret_cast<int32_t*>(of_row.address()));
    }
    const auto* const of_expert = reinterpret_cast<const int64_t*>(sizes.address());
    // 64 ranks with 4 experts here.
    const Tensor numbers = Tensor::zeros(device, {5}, DType::i64),
                 regrouped = Tensor::zeros(device, {2, kSlots}, DType::i32);
    auto* const two = reinterpret_cast<int32_t*>(regrouped.address());
    run(device, {}, family.regroup, of_expert, 64, 4, kSlots, reinterpret_cast<int64_t*>(numbers.address()),
        two, two + kSlots);
    run(device, {}, family.permute, out_of(x), integers(slot_of_row), floats(weights), out_of(rows), kSlots,
        kTopk, kCols);
    run(device, {}, family.unpermute, out_of(rows), integers(row_of_slot), floats(weights), out_of(x),
        kTokens, kTopk, kCols);
    run(device, {}, family.unpermute_backward_weights, out_of(x), out_of(rows), integers(row_of_slot),
        floats(weights), kTokens, kTopk, kCols);
    run(device, {}, family.sum_rows, out_of(rows), of_expert, kExperts, kCols, floats(sums));
    run(device, {}, family.clear_unused, out_of(rows), of_expert, kExperts - 1, kSlots, kCols);
  });
}

TEST_CASE("real sizes: grouped GEMMs") {
  for (const DType type : {DType::bf16, DType::f32})
    check_sizes([&](test::SampledDevice& device) {
      constexpr int64_t kRows = 524288, kExperts = 256, kIn = 7168, kOut = 4096;
      const kernels::Gemm& family = *families().gemm;
      const Tensor sizes = filled<int64_t>(device, kExperts, [](int64_t) { return kRows / kExperts; });
      const auto* const of_expert = reinterpret_cast<const int64_t*>(sizes.address());
      const Tensor x = Tensor::empty(device, {kRows, kIn}, type),
                   w = Tensor::empty(device, {kExperts, kIn, kOut}, type),
                   y = Tensor::empty(device, {kRows, kOut}, type),
                   dw = Tensor::empty(device, {kExperts, kIn, kOut});
      const auto multiply = [&](const kernels::GemmShape& s, kernels::GemmGroups groups, const Tensor& a,
                                const Tensor& b, const Tensor& c) {
        run(device,
            family.run_grouped_workspace(s, groups, kExperts, {a.dtype(), b.dtype(), c.dtype()}, 1, 0),
            family.run_grouped, s, groups, of_expert, kExperts, kernels::In(out_of(a)),
            kernels::In(out_of(b)), out_of(c), 1, 0, {});
      };
      multiply(
          {.m = kRows, .n = kOut, .k = kIn, .lda = kIn, .ldb = kOut, .ldc = kOut, .stride_b = kIn * kOut},
          kernels::GemmGroups::m, x, w, y);
      multiply({.trans_b = true,
                .m = kRows,
                .n = kIn,
                .k = kOut,
                .lda = kOut,
                .ldb = kOut,
                .ldc = kIn,
                .stride_b = kIn * kOut},
               kernels::GemmGroups::m, y, w, x);
      multiply({.trans_a = true,
                .m = kIn,
                .n = kOut,
                .k = kRows,
                .lda = kIn,
                .ldb = kOut,
                .ldc = kOut,
                .stride_c = kIn * kOut},
               kernels::GemmGroups::k, x, y, dw);
    });
}

// The last rows of a vocabulary of 256k.
TEST_CASE("real sizes: token ids and labels") {
  check_sizes([](test::SampledDevice& device) {
    constexpr int64_t kRows = 524288, kVocabulary = 262144, kCols = 8448;
    const kernels::Embedding& family = *families().embedding;
    const Tensor ids =
        filled<int32_t>(device, kRows, [](int64_t row) { return kVocabulary - 1 - row % kVocabulary; });
    const Tensor table = Tensor::empty(device, {kVocabulary, kCols}, DType::bf16),
                 y = Tensor::empty(device, {kRows, kCols}, DType::bf16),
                 gradient = Tensor::empty(device, {kVocabulary, kCols});
    run(device, {}, family.forward, out_of(table), integers(ids), {}, nullptr, out_of(y), kRows, kCols, 0,
        kVocabulary);
    run(device, family.backward_workspace(kRows, kCols, kVocabulary), family.backward, out_of(y),
        integers(ids), floats(gradient), kRows, kCols, 0, kVocabulary);
  });
  check_sizes([](test::SampledDevice& device) {
    constexpr int64_t kRows = 32768, kCols = 256000;
    const kernels::CrossEntropy& family = *families().cross_entropy;
    const Tensor labels = filled<int32_t>(device, kRows, [](int64_t) { return kCols - 1; });
    for (const DType type : {DType::f32, DType::bf16}) {
      const Tensor logits = Tensor::zeros(device, {kRows, kCols}, type),
                   of_rows = Tensor::zeros(device, {kRows});
      float* const values = floats(of_rows);
      run(device, {}, family.softcap, out_of(logits), 30, kRows * kCols);
      run(device, {}, family.row_max, out_of(logits), kRows, kCols, kCols, values);
      run(device, {}, family.row_sums, out_of(logits), integers(labels), values, kRows, kCols, kCols, 0,
          values, values);
      run(device, {}, family.loss, values, values, values, kRows, values);
      run(device, {}, family.full, out_of(logits), integers(labels), values, kRows, kCols, kCols, 0, values,
          out_of(logits), kCols);
      // In 16 bits in the first half of each row of fp32.
      const bool is_float = type == DType::f32;
      run(device, {}, family.backward, out_of(logits), integers(labels), values, values, values, kRows, kCols,
          kCols, 0, 30, {logits.address(), DType::bf16}, is_float ? 2 * kCols : kCols);
    }
  });
}

// Two sequences of 1M tokens in documents of 1000: the last queries and keys of an array of 1.2e10 elements,
// which a block reaches soon.
TEST_CASE("real sizes: attention in documents") {
  const auto attend = [](test::SampledDevice& device) {
    constexpr int64_t kSeq = int64_t{1} << 20, kEach = 1000, kInSequence = ceil_div(kSeq, kEach), kHead = 128;
    const kernels::AttentionShape s{.groups = 8,
                                    .heads_per_group = 4,
                                    .qk_dim = kHead,
                                    .v_dim = kHead,
                                    .batch = 2,
                                    .seq = kSeq,
                                    .scale = 0.1f};
    const kernels::QkvLayout qkv{s.groups, s.heads_per_group, kHead};
    const kernels::HeadStrides of_output{s.heads() * kHead, s.heads_per_group * kHead, kHead};
    const int64_t tokens = s.batch * kSeq;
    const Tensor starts = filled<int32_t>(device, s.batch * kInSequence + 1, [&](int64_t i) {
      return i / kInSequence * kSeq + i % kInSequence * kEach;
    });
    const kernels::Documents documents{
        .cu_seqlens = integers(starts), .count = s.batch * kInSequence, .max_seqlen = kEach};
    const Tensor x = Tensor::empty(device, {tokens, qkv.row()}, DType::bf16),
                 dx = Tensor::empty(device, {tokens, qkv.row()}, DType::bf16),
                 y = Tensor::empty(device, {tokens, s.heads() * kHead}, DType::bf16),
                 lse = Tensor::empty(device, {s.batch, s.heads(), kSeq});
    const auto heads = [&](const Tensor& of, int64_t at) {
      return kernels::HeadsOut{{of.slice(1, at, 1).address(), DType::bf16}, qkv.strides()};
    };
    const kernels::HeadsOut out{out_of(y), of_output};
    const kernels::HeadsIn q = heads(x, qkv.query(0)), k = heads(x, qkv.key(0)), v = heads(x, qkv.value(0));
    const kernels::Attention& family = *families().attention;
    run(device, family.forward_workspace(s, DType::bf16, documents.count), family.forward, s, q, k, v,
        documents, nullptr, out, floats(lse));
    run(device, family.backward_workspace(s, DType::bf16, documents.count), family.backward, s, q, k, v, out,
        floats(lse), out, documents, nullptr, heads(dx, qkv.query(0)), heads(dx, qkv.key(0)),
        heads(dx, qkv.value(0)));
  };
  // All bounds of queries, a warp for each tile.
  check_sizes(attend, {.blocks = 8, .complete = int64_t{1} << 20});
}

// A cache of 2^33 elements, and the choice of tokens from a vocabulary of 256k.
TEST_CASE("real sizes: generation") {
  check_sizes([](test::SampledDevice& device) {
    constexpr int64_t kBatch = 8, kCapacity = int64_t{1} << 20, kHead = 128, kTokens = 2;
    const kernels::AttentionShape s{.groups = 8,
                                    .heads_per_group = 4,
                                    .qk_dim = kHead,
                                    .v_dim = kHead,
                                    .batch = kBatch,
                                    .seq = kTokens,
                                    .scale = 0.1f};
    const kernels::QkvLayout qkv{s.groups, s.heads_per_group, kHead};
    const Tensor x = Tensor::zeros(device, {kBatch * kTokens, qkv.row()}, DType::bf16),
                 y = Tensor::empty(device, {kBatch * kTokens, s.heads() * kHead}, DType::bf16),
                 keys = Tensor::empty(device, {kBatch, s.groups, kCapacity, kHead}, DType::bf16),
                 values = Tensor::empty(device, {kBatch, s.groups, kCapacity, kHead}, DType::bf16),
                 past = filled<int32_t>(device, 1, [](int64_t) { return kCapacity - kTokens; });
    const auto heads = [&](int64_t at) {
      return kernels::HeadsIn{{x.slice(1, at, 1).address(), DType::bf16}, qkv.strides()};
    };
    const kernels::HeadStrides of_output{s.heads() * kHead, s.heads_per_group * kHead, kHead};
    const kernels::Attention& attention = *families().attention;
    run(device, attention.decode_workspace(s, DType::bf16, kCapacity), attention.decode, s,
        heads(qkv.query(0)), heads(qkv.key(0)), heads(qkv.value(0)), out_of(keys), out_of(values),
        integers(past), kCapacity, {out_of(y), of_output}, nullptr);

    constexpr int64_t kRows = 16384, kCols = 256000;
    const kernels::Decoding& decoding = *families().decoding;
    const Tensor logits = Tensor::empty(device, {kRows, kCols}),
                 tokens = Tensor::empty(device, {kRows}, DType::i32);
    for (const kernels::SamplingOptions& options :
         {kernels::SamplingOptions{.temperature = 0}, kernels::SamplingOptions{.top_k = 50},
          kernels::SamplingOptions{.top_p = 0.9}, kernels::SamplingOptions{}})
      run(device, decoding.sample_workspace(options, kRows, kCols), decoding.sample, options, floats(logits),
          kRows, kCols, kCols, integers(past), reinterpret_cast<int32_t*>(tokens.address()));
  });
}

// One range with the parameters of a model of 8e9: no shape of a layer has as many elements.
TEST_CASE("real sizes: flat buffers") {
  check_sizes([](test::SampledDevice& device) {
    constexpr int64_t kCount = 8'030'261'248;
    const Tensor range = Tensor::from_host_bytes(
        device, {static_cast<int64_t>(sizeof(kernels::UpdateRange))}, DType::u8,
        std::as_bytes(
            std::span<const kernels::UpdateRange>(std::array{kernels::UpdateRange{.count = kCount}})));
    const Tensor control =
        Tensor::zeros(device, {static_cast<int64_t>(sizeof(kernels::StepControl))}, DType::u8);
    const kernels::In step{control.address(), DType::u8}, ranges{range.address(), DType::u8};
    const auto make = [&](DType type, int64_t divisor) {
      return Tensor::empty(device, {kCount / divisor}, type);
    };
    const Tensor gradient = make(DType::f32, 1), main = make(DType::f32, 1), first = make(DType::f32, 1),
                 second = make(DType::f32, 1), model = make(DType::bf16, 1),
                 result = Tensor::zeros(device, {2}, DType::f64);
    const kernels::Optimizers& family = *families().optimizers;
    const kernels::WorkspaceSize update = family.update_workspace(1);
    const kernels::AdamStep adam{.rounding = {.enabled = true}};
    run(device, update, family.adam, adam, step, ranges, 1, out_of(gradient), out_of(main), out_of(first),
        nullptr, out_of(second), nullptr, out_of(model));
    {
      const Tensor codes[] = {make(DType::u8, 1), make(DType::u8, 1)},
                   scales[] = {make(DType::f32, kernels::kMomentBlock),
                               make(DType::f32, kernels::kMomentBlock)};
      run(device, update, family.adam, adam, step, ranges, 1, out_of(gradient), out_of(main),
          out_of(codes[0]), floats(scales[0]), out_of(codes[1]), floats(scales[1]), out_of(model));
      auto* const moment = reinterpret_cast<uint8_t*>(codes[0].address());
      run(device, {}, family.encode_moment, ranges, 1, true, floats(first), 0, kCount, moment,
          floats(scales[0]));
      run(device, {}, family.decode_moment, ranges, 1, true, moment, floats(scales[0]), 0, kCount,
          floats(first));
    }
    run(device, update, family.sgd, {.momentum = 0.9f}, step, ranges, 1, floats(gradient), floats(main),
        floats(first), out_of(model));
    run(device, update, family.lion, {}, step, ranges, 1, floats(gradient), floats(main), floats(first),
        out_of(model));
    run(device, update, family.muon_momentum, {.nesterov = true}, step, ranges, 1, floats(gradient),
        floats(main), floats(first));
    run(device, update, family.muon_update, {}, step, ranges, 1, floats(gradient), floats(main),
        out_of(model));
    auto* const number = reinterpret_cast<double*>(result.address());
    auto* const integer = reinterpret_cast<int64_t*>(number + 1);
    run(device, {}, family.normalize, number, 1e-7f, floats(gradient), kCount);
    run(device, family.sum_of_squares_workspace(1, kCount), family.sum_of_squares, ranges, 1,
        out_of(gradient), number, false);
    run(device, family.count_zeros_workspace(1, kCount), family.count_zeros, ranges, 1, out_of(gradient),
        integer, false);
    run(device, {}, families().step_control->add_fingerprint, out_of(gradient), 4 * kCount, 0, integer);
    const Tensor codes = make(DType::u8, 2), scales = make(DType::f32, 64);
    run(device, {}, families().adapter->nf4_quantize, floats(main), kCount, 64,
        reinterpret_cast<uint8_t*>(codes.address()), floats(scales));
  });
}

#include "kernels/cpu/onednn.hpp"

#include <dlfcn.h>

#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>

#include "kernels/cpu/level.hpp"

namespace capstan::kernels {

namespace {

// Debian's oneDNN uses OpenMP. Each thread sets its number of OpenMP threads to one, because the bits of a
// threaded GEMM depend on the number of threads.
void use_one_openmp_thread() {
  static const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  thread_local bool done = false;
  if (!done && set) set(1);
  done = true;
}

// oneDNN generates its code for the processor; it obeys CAPSTAN_CPU by its own limit.
dnnl::engine make_engine() {
  switch (cpu_level()) {
    case CpuLevel::sse4:
      dnnl::set_max_cpu_isa(dnnl::cpu_isa::sse41);
      break;
    case CpuLevel::avx2:
      dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx2);
      break;
    case CpuLevel::avx512:
      dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16);
      break;
    case CpuLevel::amx:
      break;
  }
  return {dnnl::engine::kind::cpu, 0};
}
const dnnl::engine& engine() {
  static const dnnl::engine cpu = make_engine();
  return cpu;
}

dnnl::memory::data_type type_of(DType type) {
  return type == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

struct Primitive {
  dnnl::matmul::primitive_desc description;
  dnnl::matmul primitive;
};

dnnl::matmul::primitive_desc describe(const GemmShape& s, DType in, DType out, bool add) {
  using dnnl::memory;
  const memory::desc a({s.m, s.k}, type_of(in), s.trans_a ? memory::dims{1, s.lda} : memory::dims{s.lda, 1});
  const memory::desc b({s.k, s.n}, type_of(in), s.trans_b ? memory::dims{1, s.ldb} : memory::dims{s.ldb, 1});
  const memory::desc c({s.m, s.n}, type_of(out), memory::dims{s.ldc, 1});
  dnnl::primitive_attr attributes;
  // The launch gives the temporary memory.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  // `true`: the descriptor is empty if oneDNN has no implementation.
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine(), true);
}

using Key = std::array<int64_t, 10>;
Key key_of(const GemmShape& s, DType in, DType out, bool add) {
  return {s.trans_a, s.trans_b, s.m,
          s.n,       s.k,       s.lda,
          s.ldb,     s.ldc,     static_cast<int64_t>(in) * 16 + static_cast<int64_t>(out),
          add};
}

// A training step has a few dozen tile shapes; each thread keeps its primitives.
Primitive* primitive_for(const GemmShape& s, DType in, DType out, bool add) {
  thread_local std::map<Key, Primitive> known;
  const Key key = key_of(s, in, out, add);
  if (const auto found = known.find(key); found != known.end()) return &found->second;
  if (known.size() > 512) known.clear();
  auto description = describe(s, in, out, add);
  if (!description.get(true)) return nullptr;
  dnnl::matmul primitive(description);
  return &known.emplace(key, Primitive{std::move(description), std::move(primitive)}).first->second;
}

}  // namespace

bool onednn_gemm(const GemmShape& s, In a, In b, Out c, float beta, void* workspace) {
  use_one_openmp_thread();
  thread_local dnnl::stream stream(engine());
  Primitive* cached = primitive_for(s, a.dtype, c.dtype, beta != 0);
  if (!cached) return false;
  const auto& d = cached->description;
  dnnl::memory ma(d.src_desc(), engine(), const_cast<void*>(a.data)),
      mb(d.weights_desc(), engine(), const_cast<void*>(b.data)), mc(d.dst_desc(), engine(), c.data),
      scratchpad(d.scratchpad_desc(), engine(), workspace);
  cached->primitive.execute(
      stream,
      {{DNNL_ARG_SRC, ma}, {DNNL_ARG_WEIGHTS, mb}, {DNNL_ARG_DST, mc}, {DNNL_ARG_SCRATCHPAD, scratchpad}});
  stream.wait();
  return true;
}

size_t onednn_workspace(const GemmShape& s, DType in, DType out, float beta) {
  use_one_openmp_thread();
  thread_local std::map<Key, size_t> known;
  const Key key = key_of(s, in, out, beta != 0);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() > 512) known.clear();
  const auto description = describe(s, in, out, beta != 0);
  return known[key] = description.get(true) ? description.scratchpad_desc().get_size() : 0;
}

const char* native_bf16() {
  static const char* const answer = [] {
    if (!runs(CpuLevel::avx512) || !__builtin_cpu_supports("avx512bf16")) return "";
    const auto description =
        describe({false, true, 512, 512, 512, 512, 512, 512}, DType::bf16, DType::f32, false);
    if (!description.get(true)) return "";
    return std::string(description.impl_info_str()).find("amx") != std::string::npos ? "AMX bf16"
                                                                                     : "AVX-512 bf16";
  }();
  return answer;
}

}  // namespace capstan::kernels

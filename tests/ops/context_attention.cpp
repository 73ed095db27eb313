// Run with 2, 3 and 4 ranks: attention of sequences that are sharded over the ranks equals attention of the
// full sequences on one.
#include "ops/context_attention.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/reduce.hpp"
#include "nn/param_list.hpp"
#include "ops/matmul.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using namespace capstan::test;
using ops::ContextExchange;
using ops::ContextParallel;

namespace {

using test::world;
int ranks() {
  return world().size();
}
int me() {
  return world().rank();
}

// A group that counts the bytes which this rank sends to others, and writes down what happens in which order:
// s: a send has begun; w: a receive is waited for.
class Counting final : public comm::Communicator {
 public:
  explicit Counting(comm::Communicator& group) : group_(group) {}
  int64_t bytes_sent = 0;
  static inline std::string order;
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  const std::string& name() const override { return group_.name(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    return group_.split(color, key, name);
  }
  comm::WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    bytes_sent += bytes * (size() - 1);
    return group_.start_all_gather(mine, all, bytes);
  }
  comm::WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    bytes_sent += bytes * (size() - 1);
    return group_.start_all_to_all(send, receive, bytes);
  }
  comm::WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    return group_.start_broadcast(data, bytes, root);
  }
  comm::WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    bytes_sent += bytes;
    order += 's';
    return group_.start_send(data, bytes, to);
  }
  comm::WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return std::make_unique<Received>(group_.start_receive(data, bytes, from));
  }
  void barrier() override { group_.barrier(); }
  int64_t sent_bytes() const override { return bytes_sent; }

 private:
  struct Received final : comm::Work {
    explicit Received(comm::WorkHandle inner_work) : inner(std::move(inner_work)) {}
    void wait() override {
      order += 'w';
      inner->wait();
    }
    comm::WorkHandle inner;
  };
  comm::Communicator& group_;
};

// The exchanges that this many ranks can do, and the ranks among which each exchanges heads.
struct Way {
  std::string name;
  ContextParallel context;
  int64_t a2a = 1;
  std::vector<Counting*> groups;
  int64_t sent_bytes() const {
    int64_t total = 0;
    for (const Counting* group : groups) total += group->bytes_sent;
    return total;
  }
};
const std::vector<Way>& ways() {
  static std::vector<std::unique_ptr<comm::Communicator>> parts;
  static std::vector<std::unique_ptr<Counting>> counting;
  static const std::vector<Way> all = [] {
    const auto counted = [](comm::Communicator& group) {
      return counting.emplace_back(std::make_unique<Counting>(group)).get();
    };
    std::vector<Way> made;
    Counting* group = counted(world().communicator());
    made.push_back({"p2p", {.exchange = ContextExchange::p2p, .group = group}, 1, {group}});
    made.push_back({"all_gather", {.exchange = ContextExchange::all_gather, .group = group}, 1, {group}});
    made.push_back({"a2a", {.exchange = ContextExchange::a2a, .group = group}, ranks(), {group}});
    for (int inner = 1; inner <= ranks(); ++inner) {
      if (ranks() % inner != 0) continue;
      auto& near = *parts.emplace_back(world().communicator().split(me() / inner, me() % inner, "cp-inner"));
      auto& far = *parts.emplace_back(world().communicator().split(me() % inner, me() / inner, "cp-outer"));
      Counting *a = counted(near), *b = counted(far);
      made.push_back({"a2a+p2p with " + std::to_string(inner) + " * " + std::to_string(ranks() / inner),
                      {ContextExchange::a2a_p2p, group, a, b},
                      inner,
                      {group, a, b}});
    }
    return made;
  }();
  return all;
}

struct Case {
  // A sequence has 2 * ranks chunks.
  int64_t groups = 1, per_group = 1, d = 8, batch = 1, chunk = 4;
  int64_t window = 0;
  bool causal = true, documents = false;
  float dropout = 0;
  DType type = DType::f32;
  uint64_t seed = 1;
  // Before attention.
  bool norm = false, rotates = false;
  // A learned logit of each head in its softmax.
  bool sinks = false;

  int64_t seq() const { return 2 * ranks() * chunk; }
  kernels::QkvLayout layout() const { return {groups, per_group, d}; }
  int64_t heads() const { return groups * per_group; }
  bool legal(const Way& way) const {
    return heads() % way.a2a == 0 && (groups % way.a2a == 0 || way.a2a % groups == 0);
  }
  std::string text() const {
    return std::to_string(groups) + " groups of " + std::to_string(per_group) + " heads of " +
           std::to_string(d) + ", " + std::to_string(batch) + " * " + std::to_string(seq()) +
           " tokens, window " + std::to_string(window) + (causal ? "" : ", not causal") +
           (documents ? ", documents" : "") + (norm ? ", qk norm" : "") + (rotates ? ", rope" : "") +
           (sinks ? ", sinks" : "") + ", dropout " + std::to_string(dropout) + ", " +
           std::string(name_of(type));
  }
};

// Documents that begin anywhere, two tokens after the first of a chunk too.
std::vector<int32_t> documents_of(const Case& c) {
  PhiloxSequence random(philox_key(c.seed, purpose::test, 7));
  std::vector<int32_t> start;
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t first = 0, next = c.chunk + 2;
    for (int64_t i = 0; i < c.seq(); ++i) {
      if (i == next) {
        first = i;
        next = i + 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(3 * c.chunk)));
      }
      start.push_back(static_cast<int32_t>(first));
    }
  }
  return start;
}

// The rows of this rank of x [batch * seq][width].
template <class T>
std::vector<T> mine(const std::vector<T>& x, const Case& c) {
  const auto width = static_cast<int64_t>(x.size()) / (c.batch * c.seq());
  const auto rows = ops::context_rows(ranks(), me(), c.seq());
  std::vector<T> part;
  for (int64_t b = 0; b < c.batch; ++b)
    for (const kernels::PositionSegment& segment : rows.segments)
      part.insert(part.end(), x.begin() + (b * c.seq() + segment.begin) * width,
                  x.begin() + (b * c.seq() + segment.end()) * width);
  return part;
}

Tensor typed(Device& device, int64_t rows, const std::vector<float>& values, DType type) {
  const Shape shape{rows, static_cast<int64_t>(values.size()) / rows};
  if (type == DType::f32) return Tensor::from_host<float>(device, shape, values);
  std::vector<bf16> narrow;
  for (const float v : values) narrow.emplace_back(v);
  return Tensor::from_host<bf16>(device, shape, narrow);
}
std::vector<float> floats(int64_t count, uint64_t seed) {
  const auto values = testing::random_values(count, seed);
  return {values.begin(), values.end()};
}

struct Run {
  std::vector<float> out, gradient, weight_gradients;
  bool operator==(const Run&) const = default;
};
enum class RegionKind : uint8_t { plain, recomputed };

struct Inputs {
  std::vector<float> qkv, dout;
  std::vector<int64_t> dropout_rows;
  std::vector<int32_t> documents;
  explicit Inputs(const Case& c)
      : qkv(floats(c.batch * c.seq() * c.layout().row(), c.seed)),
        dout(floats(c.batch * c.seq() * c.heads() * c.d, c.seed + 50)),
        dropout_rows(testing::dropout_rows(c.batch * c.seq())),
        documents(documents_of(c)) {}
};

// On these rows alone (context given), or on full sequences.
Run run(Device& device, const Case& c, const Inputs& in, const ContextParallel* context,
        RegionKind region = RegionKind::plain, TapeObserver* observer = nullptr) {
  const auto local = [&](const auto& x) { return context ? mine(x, c) : x; };
  ops::AttentionOptions options(c.layout());
  options.shape.batch = c.batch;
  options.shape.seq = context ? c.seq() / ranks() : c.seq();
  options.shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.d)));
  options.shape.window = c.window;
  options.shape.causal = c.causal;
  options.shape.dropout = c.dropout;
  options.shape.dropout_key = philox_key(3, purpose::attention_dropout, 2);
  options.shape.head_offset = 5;
  const int64_t rows = c.batch * options.shape.seq;
  if (c.documents) options.documents.start = Tensor::from_host<int32_t>(device, {rows}, local(in.documents));
  if (c.dropout > 0)
    options.dropout_rows = Tensor::from_host<int64_t>(device, {rows}, local(in.dropout_rows));
  nn::ParamList list;
  for (const char* name : {"q", "k"})
    if (c.norm) list.add(nn::ModulePath{name}.spec("weight", {c.d}, {}));
  if (c.sinks) options.sink = {true, &list.add(nn::ModulePath{"sink"}.spec("weight", {c.heads()}, {}))};
  const auto parameters = list.take();
  SimpleStore store(device, parameters, c.type);
  for (const auto& p : parameters)
    store.set(*p, floats(p->shape().elements(), c.seed + 80 + static_cast<uint64_t>(p->index())));
  if (c.norm) {
    options.transform.norm = {.q_gamma = parameters[0].get(), .k_gamma = parameters[1].get()};
    options.transform.norm_options = {.rms = true, .epsilon = 1e-3f};
  }
  if (c.rotates) {
    std::vector<int32_t> positions;
    for (int64_t t = 0; t < c.batch * c.seq(); ++t) positions.push_back(static_cast<int32_t>(t % c.seq()));
    const int64_t half = c.d / 2;
    options.transform.table = {typed(device, c.seq(), floats(c.seq() * half, 90), DType::f32),
                               typed(device, c.seq(), floats(c.seq() * half, 91), DType::f32)};
    options.transform.positions = Tensor::from_host<int32_t>(device, {rows}, local(positions));
  }
  StepContext step{device, store, observer};
  Tape tape(step);
  Var qkv = tape.input("qkv", typed(device, rows, local(in.qkv), c.type), true);
  const Tape::Body body = [&](Tape& t, std::span<const Var> x) -> std::vector<Var> {
    // A copy that nothing else holds, which may be rotated in place.
    Var own{c.rotates && !c.norm ? ops::copy_of(x[0].value) : x[0].value, x[0].slot};
    return {context ? ops::context_attention(t, std::move(own), options, *context)
                    : ops::attention(t, std::move(own), options)};
  };
  Var out = region == RegionKind::recomputed ? tape.recompute("region", {qkv}, body)[0]
                                             : body(tape, std::vector<Var>{qkv})[0];
  tape.output("out", out);
  const Tensor values = out.value;
  tape.backward({{"out", typed(device, rows, local(in.dout), c.type)}}, {.delay_weight_gradients = true});
  CHECK(tape.pending_weight_gradients() == parameters.size());
  tape.run_weight_gradients();
  if (device.is_meta()) return {};
  Run result{values.to_floats(), tape.input_gradient("qkv").to_floats(), {}};
  for (const auto& p : parameters)
    for (const float g : store.gradient(*p).to_floats()) result.weight_gradients.push_back(g);
  return result;
}

// The largest difference relative to the largest value.
double difference(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, largest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    if (!(d <= worst)) worst = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return worst / largest;
}

void check_case(const Case& c, bool every_device) {
  INFO(c.text());
  const Inputs in(c);
  const auto cpu = Cpu::make(1);
  const Run full = run(*cpu, c, in, nullptr);
  const std::vector<float> out = mine(full.out, c), gradient = mine(full.gradient, c);
  const double tolerance = c.type == DType::f32 ? 1e-5 : 2e-2;
  for (const Way& way : ways()) {
    if (!c.legal(way)) continue;
    INFO(way.name);
    const Run first = run(*cpu, c, in, &way.context);
    CHECK(difference(first.out, out) < tolerance);
    CHECK(difference(first.gradient, gradient) < tolerance);
    if (c.norm || c.sinks) {  // each rank has the part of its rows, or heads
      std::vector<double> sum(first.weight_gradients.begin(), first.weight_gradients.end());
      comm::all_reduce(world().communicator(), sum);
      CHECK(difference({sum.begin(), sum.end()}, full.weight_gradients) < 2 * tolerance);
    }
    CHECK((run(*cpu, c, in, &way.context) == first));
    CHECK((run(*cpu, c, in, &way.context, RegionKind::recomputed) == first));
    if (!every_device) continue;
    FirstResults<Run> firsts;
    firsts.of(*cpu) = first;
    on_every_device([&](Device& device) {
      // The simulation takes minutes for more ranks.
      if (device.type() == DeviceType::simulated && world().size() > 2) return;
      const Run result = run(device, c, in, &way.context);
      if (!firsts.of(device)) {
        firsts.of(device) = result;
        CHECK(difference(result.out, out) < tolerance);
        CHECK(difference(result.gradient, gradient) < tolerance);
      }
      CHECK((result == *firsts.of(device)));
    });
  }
}

// The events of the tape, in order; B among the s and w of a group: a block is computed.
struct Recorder final : TapeObserver {
  std::vector<TapeEvent> events;
  void observe(const TapeEvent& event) override {
    events.push_back(event);
    if (event.nested && event.phase != 'C') Counting::order += 'B';
  }
};

}  // namespace

TEST_CASE("a rank holds its chunk from the front and its chunk from the back") {
  for (const int64_t n : {2, 3, 8})
    for (const int64_t chunk : {1, 5}) {
      const int64_t seq = 2 * n * chunk;
      std::vector<int> seen(static_cast<size_t>(seq));
      int64_t least = seq * seq, most = 0;
      for (int64_t r = 0; r < n; ++r) {
        const auto rows = ops::context_rows(n, r, seq);
        CHECK(rows.rows() == seq / n);
        CHECK(rows.segments[0].begin == r * chunk);
        // The pairs of query and key that a causal rank computes.
        int64_t pairs = 0;
        for (const auto& segment : rows.segments)
          for (int64_t i = segment.begin; i < segment.end(); ++i)
            ++seen[static_cast<size_t>(i)], pairs += i + 1;
        least = std::min(least, pairs), most = std::max(most, pairs);
      }
      CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
      CHECK(least == most);
    }
  CHECK(ops::context_rows(1, 0, 7).rows() == 7);
  CHECK(ops::context_rows(1, 0, 7).segments[0].count == 7);
  try {
    ops::context_rows(3, 1, 20);
    FAIL("20 tokens do not divide by 6");
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::config);
    CHECK(e.help().find("18 and 24") != std::string::npos);
  }
}

TEST_CASE("every exchange equals the full sequence: grouped, shared and single keys, odd sizes") {
  uint64_t seed = 10;
  using Choice = std::pair<DType, int64_t>;
  for (const auto& [type, chunk] :
       {Choice{DType::f32, 1}, {DType::f32, 7}, {DType::f32, 35}, {DType::bf16, 10}})
    for (const auto& [groups, per_group, d] :
         {std::array<int64_t, 3>{3, 3, 20}, {1, 4, 9}, {1, 6, 5}, {2, 1, 5}, {2, 2, 8}, {4, 3, 16}})
      check_case({.groups = groups,
                  .per_group = per_group,
                  .d = d,
                  .batch = 1 + chunk % 3,
                  .chunk = chunk,
                  .type = type,
                  .seed = seed++},
                 false);
}

TEST_CASE(
    "every exchange equals the full sequence: windows, documents, dropout, no causality, every device") {
  uint64_t seed = 100;
  const int64_t n = ranks();
  for (const DType type : {DType::f32, DType::bf16})
    for (const float dropout : {0.0f, 0.3f})
      for (const bool documents : {false, true}) {
        if (type == DType::bf16 && documents != (dropout > 0)) continue;
        Case c{.groups = n == 3 ? 3 : 2,
               .per_group = 2,
               .d = 12,
               .batch = 2,
               .chunk = 11,
               .documents = documents,
               .dropout = dropout,
               .type = type,
               .seed = seed++};
        check_case(c, true);
        for (const int64_t window : {1, 4, 15}) {
          c.window = window;
          check_case(c, false);
        }
        c.window = 0;
        c.causal = false;
        check_case(c, false);
        c.groups = 1;
        c.per_group = 2 * n;
        c.causal = true;
        check_case(c, type == DType::f32);
      }
}

TEST_CASE("every exchange equals the full sequence: queries and keys normalized and rotated before") {
  uint64_t seed = 200;
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool norm : {false, true})
      for (const bool rotates : {false, true})
        for (const auto& [groups, per_group] :
             {std::array<int64_t, 2>{ranks() == 3 ? 3 : 4, 2}, {1, 2 * ranks()}})
          check_case({.groups = groups,
                      .per_group = per_group,
                      .d = 10,
                      .batch = 2,
                      .chunk = 5,
                      .type = type,
                      .seed = seed++,
                      .norm = norm,
                      .rotates = rotates},
                     norm && rotates);
}

TEST_CASE("every exchange equals the full sequence: sinks, with windows and documents") {
  uint64_t seed = 300;
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool others : {false, true})
      for (const auto& [groups, per_group] :
           {std::array<int64_t, 2>{ranks() == 3 ? 3 : 4, 2}, {1, 2 * ranks()}})
        check_case({.groups = groups,
                    .per_group = per_group,
                    .d = 10,
                    .batch = 2,
                    .chunk = 5,
                    .window = others ? 4 : 0,
                    .documents = others,
                    .dropout = others ? 0.2f : 0.0f,
                    .type = type,
                    .seed = seed++,
                    .norm = others,
                    .rotates = others,
                    .sinks = true},
                   type == DType::f32);
}

TEST_CASE("dropout drops the same pairs as on one rank") {
  const Case c{
      .groups = 1, .per_group = ranks(), .d = 2 * ranks() * 6, .batch = 2, .chunk = 6, .dropout = 0.4f};
  Inputs in(c);
  // Values are unit vectors: an output is the row of probabilities itself, 0 where the pair was dropped or
  // masked.
  const auto layout = c.layout();
  for (int64_t t = 0; t < c.batch * c.seq(); ++t)
    for (int64_t i = 0; i < c.d; ++i)
      in.qkv[static_cast<size_t>(t * layout.row() + layout.value(0) + i)] = i == t % c.seq() ? 1.0f : 0.0f;
  const auto cpu = Cpu::make(1);
  const auto kept = [](const std::vector<float>& out) {
    std::vector<bool> result;
    for (const float v : out) result.push_back(v != 0);
    return result;
  };
  const auto expected = kept(mine(run(*cpu, c, in, nullptr).out, c));
  const auto share = static_cast<double>(std::count(expected.begin(), expected.end(), true)) /
                     static_cast<double>(expected.size());
  CHECK(share > 0.2);  // about 0.6 of half of the pairs
  CHECK(share < 0.4);
  for (const Way& way : ways()) {
    INFO(way.name);
    CHECK(kept(run(*cpu, c, in, &way.context).out) == expected);
  }
}

TEST_CASE("a rank sends the bytes that the formulas say, and the operation's cost counts them") {
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [groups, per_group] : {std::array<int64_t, 2>{ranks(), 2}, {1, 2 * ranks()}})
      for (const bool more : {false, true}) {
        const Case c{.groups = groups,
                     .per_group = per_group,
                     .d = 6,
                     .batch = 2,
                     .chunk = 3,
                     .documents = more,
                     .dropout = more ? 0.1f : 0.0f,
                     .type = type};
        const Inputs in(c);
        const auto cpu = Cpu::make(1);
        for (const Way& way : ways()) {
          if (!c.legal(way)) continue;
          INFO(way.name, ": ", c.text());
          const int64_t before = way.sent_bytes();
          Recorder recorder;
          run(*cpu, c, in, &way.context, RegionKind::plain, &recorder);
          const int64_t n = ranks(), inner = way.a2a, outer = n / inner, rows = c.batch * c.seq() / n,
                        bytes = size_of(type);
          const int64_t my_groups = std::max<int64_t>(1, groups / inner), my_heads = c.heads() / inner;
          const int64_t heads_forward = (2 * my_heads + 2 * my_groups) * c.d * bytes + (more ? 12 : 0);
          const int64_t heads_backward =
              my_heads * c.d * bytes + (my_heads + 2 * my_groups) * c.d * (inner > groups ? 4 : bytes);
          const int64_t kv = inner * rows * my_groups * 2 * c.d;
          const int64_t forward = (inner - 1) * rows * heads_forward + (outer - 1) * kv * bytes,
                        backward = (inner - 1) * rows * heads_backward + (outer - 1) * kv * (bytes + 4);
          CHECK(way.sent_bytes() - before == forward + backward);
          const auto touched = static_cast<double>(rows * (2 * c.heads() + 2 * groups) * c.d * bytes);
          for (const TapeEvent& event : recorder.events)
            if (!event.nested) {
              CHECK(event.cost.bytes == (event.phase == 'F' ? touched : 2 * touched));
              CHECK(event.cost.sent_bytes == static_cast<double>(event.phase == 'F' ? forward : backward));
            }
        }
      }
}

TEST_CASE_TEMPLATE("in a ring the next keys are on their way while a block is computed", D, EVERY_DEVICE) {
  const Case c{.groups = 1, .per_group = 2, .d = 8, .chunk = 20};
  const auto device = D::make(1);
  Recorder recorder;
  Counting::order.clear();
  run(*device, c, Inputs(c), &ways()[0].context, RegionKind::plain, &recorder);
  std::string forward, backward;
  for (int step = 0; step < ranks(); ++step) {
    const bool last = step + 1 == ranks();
    forward += last ? "B" : "sBw";
    backward += last ? "B" : "sB";
    if (step > 1) backward += 'w';  // the gradient that was sent a step ago has arrived beside this block
    if (step > 0) backward += 's';
    if (!last) backward += 'w';
  }
  CHECK(Counting::order == forward + backward + "w");
  const auto named = [&](char phase, const std::string& what) {
    // Begin and end.
    std::vector<std::pair<double, double>> found;
    for (const TapeEvent& e : recorder.events)
      if (e.phase == phase && e.nested && e.name.find(what) != std::string::npos)
        found.emplace_back(e.end_seconds - e.self_seconds, e.end_seconds);
    return found;
  };
  const auto n = static_cast<size_t>(ranks());
  // Those of the forward pass, then those of the backward pass.
  const auto keys = named('C', "send keys");
  const auto gradients = named('C', "send gradients");
  REQUIRE(keys.size() == 2 * (n - 1));
  REQUIRE(gradients.size() == n - 1);
  for (const char phase : {'F', 'B'}) {
    const auto blocks = named(phase, "block");
    REQUIRE(blocks.size() == n);
    for (size_t i = 0; i + 1 < n; ++i) {
      const auto& transfer = keys[(phase == 'F' ? 0 : n - 1) + i];
      CHECK(transfer.first <= blocks[i].first);    // begun before the block that it runs beside
      CHECK(transfer.second >= blocks[i].second);  // and not waited for before its end
      CHECK(transfer.second <= blocks[i + 1].first);
    }
    if (phase == 'F') continue;
    // The gradient of block i leaves while block i + 1 is computed.
    for (size_t i = 1; i + 1 < n; ++i) {
      CHECK(gradients[i - 1].first >= blocks[i].second);
      CHECK(gradients[i - 1].first <= blocks[i + 1].first);
      CHECK(gradients[i - 1].second >= blocks[i + 1].second);
    }
  }
}

TEST_CASE("memory is the estimate of the meta device") {
  const Case c{.groups = ranks(),
               .per_group = 2,
               .d = 16,
               .batch = 2,
               .chunk = 50,
               .documents = true,
               .dropout = 0.1f,
               .type = DType::bf16};
  const Inputs in(c);
  for (const Way& way : ways()) {
    INFO(way.name);
    const auto cpu = Cpu::make(1);
    run(*cpu, c, in, &way.context);
    std::vector<std::unique_ptr<comm::Communicator>> groups;
    const auto planned = [&](const comm::Communicator* group) {
      return group
                 ? groups.emplace_back(comm::make_meta_communicator(group->rank(), group->size(), "cp")).get()
                 : nullptr;
    };
    const ContextParallel context{way.context.exchange, planned(way.context.group),
                                  planned(way.context.inner), planned(way.context.outer)};
    const auto meta = make_meta_device(kernels::cpu_table(), 1);
    run(*meta, c, in, &context);
    const MemoryUse used = cpu->memory(), estimated = meta->memory();
    CHECK(used.peak == estimated.peak);
    CHECK(used.peak_by_category == estimated.peak_by_category);
  }
}

TEST_CASE("heads that cannot be exchanged are named") {
  const Case c{.groups = ranks() + 1, .per_group = ranks(), .d = 4};
  const auto cpu = Cpu::make(1);
  try {
    run(*cpu, c, Inputs(c), &ways()[2].context);
    FAIL("groups do not divide");
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::config);
    CHECK(e.message().find("groups of keys and values") != std::string::npos);
  }
}

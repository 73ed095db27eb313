#include "parallel/pipeline.hpp"

#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "base/error.hpp"
#include "comm/exchange.hpp"

namespace capstan::parallel {

namespace {

class Runner {
 public:
  Runner(const PipelineShape& shape, const PipelineComm& links, PipelineWork& work)
      : shape_(shape), links_(links), work_(work), rank_(links.stages ? links.stages->rank() : 0) {}

  void run(const std::vector<PipelineAction>& steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
      const PipelineAction& step = steps[i];
      const Tensor input = arrived(step);
      if (links_.overlap_p2p && i + 1 < steps.size()) start_receive(steps[i + 1]);
      if (step.work == Work::weight) {
        work_.weight(step.micro_batch, step.chunk);
      } else {
        const Tensor output = step.work == Work::forward
                                  ? work_.forward(step.micro_batch, step.chunk, input)
                                  : work_.backward(step.micro_batch, step.chunk, input);
        send_on(step, output);
      }
      // The last one of each direction stays, done or not: what is held then does not depend on the
      // neighbors' pace, unless they are more than a step behind.
      for (auto* sent : {&sent_forward_, &sent_backward_})
        while (sent->size() > 1 && sent->front().done()) sent->pop_front();
    }
    for (auto* sent : {&sent_forward_, &sent_backward_})
      for (comm::Exchange& exchange : *sent) exchange.wait();
  }

 private:
  using Key = std::tuple<Work, int32_t, int32_t>;  // of the step that needs it
  struct Incoming {
    comm::Exchange exchange;
    Tensor shard, full;
  };
  struct Neighbor {
    int64_t rank, chunk;
  };

  int64_t stage_of(int64_t chunk) const { return chunk * shape_.ranks + rank_; }
  std::optional<Neighbor> at_stage(int64_t stage) const {
    if (stage < 0 || stage >= shape_.ranks * shape_.chunks) return std::nullopt;
    return Neighbor{stage % shape_.ranks, stage / shape_.ranks};
  }
  // The neighbors from which a step receives hidden states (or a gradient), and to which it sends its own.
  std::optional<Neighbor> source(const PipelineAction& step) const {
    if (step.work == Work::weight) return std::nullopt;
    return at_stage(stage_of(step.chunk) + (step.work == Work::forward ? -1 : 1));
  }
  std::optional<Neighbor> target(const PipelineAction& step) const {
    return at_stage(stage_of(step.chunk) + (step.work == Work::forward ? 1 : -1));
  }
  // Of the receiving step. A tag may be used again when no micro-batch under way has it.
  int tag(Work work, int64_t micro_batch, int64_t chunk) const {
    return static_cast<int>((micro_batch * shape_.chunks + chunk) % 8192 * 2 +
                            (work == Work::forward ? 0 : 1));
  }
  bool sharded_transfer(const Tensor& hidden_states) const {
    return !links_.tensor.alone() && !links_.tensor.sequence &&
           hidden_states.size(0) % links_.tensor.size() == 0;
  }

  template <class Transfer>
  void traced(const char* what, const PipelineAction& step, Transfer&& transfer) {
    if (!links_.context || !links_.context->observer) return transfer();
    TraceScope scope(*links_.context, 'C',
                     std::string(what) + (step.work == Work::forward ? " hidden states " : " gradient ") +
                         std::to_string(step.micro_batch));
    transfer();
    scope.end();
  }

  void start_receive(const PipelineAction& step) {
    const auto from = source(step);
    if (!from || from->rank == rank_) return;
    const Key key{step.work, step.micro_batch, step.chunk};
    if (incoming_.count(key)) return;
    const Tensor full = work_.make_hidden_states(step.micro_batch);
    Tensor shard = full;
    if (sharded_transfer(full))
      shard = Tensor::empty(full.device(), {full.size(0) / links_.tensor.size(), full.size(1)}, full.dtype());
    Incoming incoming{comm::Exchange(*links_.stages), shard, full};
    traced("start receive of", step, [&] {
      incoming.exchange.receive(shard, static_cast<int>(from->rank),
                                tag(step.work, step.micro_batch, step.chunk));
    });
    incoming_.emplace(key, std::move(incoming));
  }

  Tensor arrived(const PipelineAction& step) {
    const auto from = source(step);
    if (!from) return {};
    const Key key{step.work, step.micro_batch, step.chunk};
    if (from->rank == rank_) {  // several chunks on one rank
      const auto found = own_.find(key);
      CAPSTAN_ASSERT(found != own_.end(), "a pipeline step before what it needs");
      Tensor hidden_states = std::move(found->second);
      own_.erase(found);
      return hidden_states;
    }
    start_receive(step);
    const auto found = incoming_.find(key);
    Incoming incoming = std::move(found->second);
    incoming_.erase(found);
    traced("wait for", step, [&] { incoming.exchange.wait(); });
    if (!sharded_transfer(incoming.full)) return incoming.full;
    comm::Exchange gather(*links_.tensor.group);
    gather.all_gather(incoming.shard, incoming.full);
    gather.wait();
    return incoming.full;
  }

  void send_on(const PipelineAction& step, const Tensor& hidden_states) {
    const auto to = target(step);
    if (!to) return;
    CAPSTAN_ASSERT(hidden_states.defined(), "a pipeline stage that is not the last gave nothing");
    if (to->rank == rank_) {
      own_[{step.work, step.micro_batch, static_cast<int32_t>(to->chunk)}] = hidden_states;
      return;
    }
    Tensor shard = hidden_states;
    if (sharded_transfer(hidden_states)) {
      const int64_t rows = hidden_states.size(0) / links_.tensor.size();
      shard = hidden_states.slice(0, links_.tensor.rank() * rows, rows);
    }
    auto& sent = step.work == Work::forward ? sent_forward_ : sent_backward_;
    sent.emplace_back(*links_.stages);
    traced("send", step, [&] {
      sent.back().send(shard, static_cast<int>(to->rank), tag(step.work, step.micro_batch, to->chunk));
    });
  }

  const PipelineShape& shape_;
  const PipelineComm& links_;
  PipelineWork& work_;
  int64_t rank_;
  std::map<Key, Incoming> incoming_;
  std::map<Key, Tensor> own_;
  std::deque<comm::Exchange> sent_forward_, sent_backward_;
};

}  // namespace

void run_actions(const PipelineShape& shape, const std::vector<PipelineAction>& steps,
                 const PipelineComm& links, PipelineWork& work) {
  Runner(shape, links, work).run(steps);
}

}  // namespace capstan::parallel

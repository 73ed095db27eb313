#include "parallel/pipeline.hpp"

#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "base/error.hpp"
#include "comm/channel.hpp"

namespace capstan::parallel {

namespace {

class Runner {
 public:
  Runner(const PipelineShape& shape, const PipelineComm& links, StageComputation& stages)
      : shape_(shape), links_(links), stages_(stages), rank_(links.rank) {}

  void run(const std::vector<PipelineAction>& actions) {
    for (size_t i = 0; i < actions.size(); ++i) {
      const PipelineAction& action = actions[i];
      const Tensor input = arrived(action);
      if (links_.overlap_p2p && i + 1 < actions.size()) start_receive(actions[i + 1]);
      CAPSTAN_ASSERT(action.kind != ActionKind::weight_gradients,
                     "a schedule with separate weight gradients");
      const Tensor output = action.kind == ActionKind::forward
                                ? stages_.forward(action.micro_batch, action.chunk, input)
                                : stages_.backward(action.micro_batch, action.chunk, input);
      send_on(action, output);
    }
    // In the order of their start.
    for (auto* const sent : {&sent_forward_, &sent_backward_})
      for (comm::PendingTransfers& one : *sent) one.wait();
  }

 private:
  // Key of a received tensor: kind, micro-batch and chunk of the action that needs the tensor.
  using Key = std::tuple<ActionKind, int32_t, int32_t>;
  struct Incoming {
    comm::PendingTransfers transfers;
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
  // The neighbors from which an action receives hidden states (or a gradient), and to which it sends its own.
  std::optional<Neighbor> source(const PipelineAction& action) const {
    return at_stage(stage_of(action.chunk) + (action.kind == ActionKind::forward ? -1 : 1));
  }
  std::optional<Neighbor> target(const PipelineAction& action) const {
    return at_stage(stage_of(action.chunk) + (action.kind == ActionKind::forward ? 1 : -1));
  }
  // Both ends of a link send and receive in the order of the schedule: nothing else matches them.
  const comm::StageLinks& links(const PipelineAction& action) const {
    return action.kind == ActionKind::forward ? links_.forward : links_.backward;
  }
  bool sharded_transfer(const Tensor& hidden_states) const {
    return !links_.tensor.is_single() && !links_.tensor.sequence &&
           hidden_states.size(0) % links_.tensor.size() == 0;
  }

  template <class Transfer>
  void traced(const char* what, const PipelineAction& action, Transfer&& transfer) {
    if (!links_.context || !links_.context->observer) return transfer();
    TraceScope scope(*links_.context, 'C',
                     std::string(what) +
                         (action.kind == ActionKind::forward ? " hidden states " : " gradient ") +
                         std::to_string(action.micro_batch));
    transfer();
    scope.end();
  }

  void start_receive(const PipelineAction& action) {
    const auto from = source(action);
    if (!from || from->rank == rank_) return;
    const Key key{action.kind, action.micro_batch, action.chunk};
    if (incoming_.count(key)) return;
    const Tensor full = stages_.make_hidden_states(action.micro_batch);
    Tensor shard = full;
    if (sharded_transfer(full))
      shard = Tensor::empty(full.device(), {full.size(0) / links_.tensor.size(), full.size(1)}, full.dtype());
    Incoming incoming{{}, shard, full};
    traced("start receive of", action, [&] {
      incoming.transfers =
          links(action).in->channel().start(comm::TransferBatch().receive(shard, comm::StageLinks::kSender));
    });
    incoming_.emplace(key, std::move(incoming));
  }

  Tensor arrived(const PipelineAction& action) {
    const auto from = source(action);
    if (!from) return {};
    const Key key{action.kind, action.micro_batch, action.chunk};
    // Several chunks on one rank.
    if (from->rank == rank_) {
      const auto found = own_.find(key);
      CAPSTAN_ASSERT(found != own_.end(), "a pipeline action before what it needs");
      Tensor hidden_states = std::move(found->second);
      own_.erase(found);
      return hidden_states;
    }
    start_receive(action);
    const auto found = incoming_.find(key);
    Incoming incoming = std::move(found->second);
    incoming_.erase(found);
    traced("wait for", action, [&] { incoming.transfers.wait(); });
    if (!sharded_transfer(incoming.full)) return incoming.full;
    links_.tensor.group->channel()
        .start(comm::TransferBatch().all_gather(incoming.shard, incoming.full))
        .wait();
    return incoming.full;
  }

  void send_on(const PipelineAction& action, const Tensor& hidden_states) {
    const auto to = target(action);
    if (!to) return;
    CAPSTAN_ASSERT(hidden_states.defined(), "a pipeline stage that is not the last gave nothing");
    if (to->rank == rank_) {
      own_[{action.kind, action.micro_batch, static_cast<int32_t>(to->chunk)}] = hidden_states;
      return;
    }
    Tensor shard = hidden_states;
    if (sharded_transfer(hidden_states)) {
      const int64_t rows = hidden_states.size(0) / links_.tensor.size();
      shard = hidden_states.slice(0, links_.tensor.rank() * rows, rows);
    }
    auto& sent = action.kind == ActionKind::forward ? sent_forward_ : sent_backward_;
    if (sent.size() == kPendingSends) {
      sent.front().wait();
      sent.pop_front();
    }
    traced("send", action, [&] {
      sent.push_back(
          links(action).out->channel().start(comm::TransferBatch().send(shard, comm::StageLinks::kReceiver)));
    });
  }

  const PipelineShape& shape_;
  const PipelineComm& links_;
  StageComputation& stages_;
  int64_t rank_;
  std::map<Key, Incoming> incoming_;
  std::map<Key, Tensor> own_;
  // The last tensors sent in each direction.
  std::deque<comm::PendingTransfers> sent_forward_, sent_backward_;
};

}  // namespace

PipelineComm pipeline_comm(const comm::Mesh& mesh, const ops::TensorParallel& tensor) {
  return {.rank = mesh.index(comm::Axis::pp),
          .forward = mesh.stage_links(comm::Mesh::PipelineDirection::forward),
          .backward = mesh.stage_links(comm::Mesh::PipelineDirection::backward),
          .tensor = tensor};
}

void run_actions(const PipelineShape& shape, const std::vector<PipelineAction>& actions,
                 const PipelineComm& links, StageComputation& stages) {
  Runner(shape, links, stages).run(actions);
}

}  // namespace capstan::parallel

#include "parallel/pipeline.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "comm/channel.hpp"

namespace capstan::parallel {

namespace {

class Runner {
 public:
  Runner(const PipelineShape& shape, const PipelineComm& links, StageComputation& stages)
      : map_(shape.stages()), links_(links), stages_(stages), rank_(links.rank) {}

  void run(const std::vector<PipelineAction>& actions) {
    for (size_t i = 0; i < actions.size(); ++i) {
      const PipelineAction& action = actions[i];
      const bool has_input = action.kind != ActionKind::weight_gradients;
      const Tensor input = has_input ? arrived(action) : Tensor();
      if (links_.overlap_p2p) start_next_receive(action, std::span(actions).subspan(i + 1));
      if (!has_input) {
        stages_.weight_gradients(action.micro_batch, action.chunk);
        continue;
      }
      const Tensor output = action.kind == ActionKind::forward
                                ? stages_.forward(action.micro_batch, action.chunk, input)
                                : stages_.backward(action.micro_batch, action.chunk, input);
      send_on(action, output);
    }
    // On each link in the order of their start.
    for (auto& [link, sent] : sent_)
      for (comm::PendingTransfers& one : sent) one.wait();
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

  int64_t stage_of(int64_t chunk) const { return map_.stage_of(rank_, chunk); }
  std::optional<Neighbor> at_stage(int64_t stage) const {
    if (stage < 0 || stage >= map_.stages()) return std::nullopt;
    return Neighbor{map_.rank_of(stage), map_.chunk_of(stage)};
  }
  // The neighbors from which an action receives hidden states (or a gradient), and to which it sends its own.
  std::optional<Neighbor> source(const PipelineAction& action) const {
    return at_stage(stage_of(action.chunk) + (action.kind == ActionKind::forward ? -1 : 1));
  }
  std::optional<Neighbor> target(const PipelineAction& action) const {
    return at_stage(stage_of(action.chunk) + (action.kind == ActionKind::forward ? 1 : -1));
  }
  // Both ends of a link send and receive in the order of the schedule: nothing else matches them.
  comm::TensorChannel& link(const PipelineAction& action, int64_t from, int64_t to) const {
    using enum comm::Mesh::PipelineDirection;
    return links_.mesh->stage_link(action.kind == ActionKind::forward ? forward : backward, from, to)
        .channel();
  }
  bool sharded_transfer(const Tensor& hidden_states) const {
    return !links_.tensor.is_single() && !links_.tensor.sequence &&
           hidden_states.size(0) % links_.tensor.size() == 0;
  }

  // "hidden states 3", "gradient 0": what an action receives and sends, of which micro-batch.
  static std::string transferred(const PipelineAction& action) {
    return (action.kind == ActionKind::forward ? "hidden states " : "gradient ") +
           std::to_string(action.micro_batch);
  }
  // The same for the stage that receives it: a link may carry those of several stages.
  static std::string transferred(const PipelineAction& action, int64_t stage) {
    return transferred(action) + " of stage " + std::to_string(stage);
  }
  template <class Transfer>
  void traced(const char* what, const PipelineAction& action, Transfer&& transfer) {
    if (!links_.context || !links_.context->observer) return transfer();
    TraceScope scope(*links_.context, 'C', std::string(what) + " " + transferred(action));
    transfer();
    scope.end();
  }

  // Begins to receive the input of the next of `actions` that has one (weight gradients have none), before
  // `action` is computed. Not if that input depends on the output of `action`, as within a micro-batch: it
  // would arrive no earlier, and the first launch of a kernel can wait for all that runs on a GPU, also for a
  // receive (CUDA's lazy loading).
  void start_next_receive(const PipelineAction& action, std::span<const PipelineAction> actions) {
    const auto has_input = [](const PipelineAction& a) { return a.kind != ActionKind::weight_gradients; };
    const auto next = std::ranges::find_if(actions, has_input);
    if (next == actions.end()) return;
    if (!has_input(action) || next->micro_batch != action.micro_batch) start_receive(*next);
  }

  void start_receive(const PipelineAction& action) {
    const auto from = source(action);
    if (!from || from->rank == rank_) return;
    const Key key{action.kind, action.micro_batch, action.chunk};
    if (incoming_.count(key)) return;
    const Tensor full = stages_.make_input(action);
    Tensor shard = full;
    if (sharded_transfer(full))
      shard = Tensor::empty(full.device(), {full.size(0) / links_.tensor.size(), full.size(1)}, full.dtype());
    Incoming incoming{{}, shard, full};
    traced("start receive of", action, [&] {
      incoming.transfers = link(action, from->rank, rank_)
                               .start(comm::TransferBatch(transferred(action, stage_of(action.chunk)))
                                          .receive(shard, comm::StageLink::kSender));
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
        .start(comm::TransferBatch(transferred(action, stage_of(action.chunk)))
                   .all_gather(incoming.shard, incoming.full))
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
    auto& sent = sent_[{action.kind, to->rank}];
    if (sent.size() == kPendingSends) {
      sent.front().wait();
      sent.pop_front();
    }
    traced("send", action, [&] {
      sent.push_back(link(action, rank_, to->rank)
                         .start(comm::TransferBatch(transferred(action, map_.stage_of(to->rank, to->chunk)))
                                    .send(shard, comm::StageLink::kReceiver)));
    });
  }

  const comm::StageMap map_;
  const PipelineComm& links_;
  StageComputation& stages_;
  int64_t rank_;
  std::map<Key, Incoming> incoming_;
  std::map<Key, Tensor> own_;
  // The last tensors sent over each link: hidden states or gradients, to a rank.
  std::map<std::pair<ActionKind, int64_t>, std::deque<comm::PendingTransfers>> sent_;
};

}  // namespace

void StageComputation::weight_gradients(int64_t, int64_t) {
  fail(ErrorCode::internal, "internal error: weight gradients in a computation without them");
}

PipelineComm pipeline_comm(const comm::Mesh& mesh, const ops::TensorParallel& tensor) {
  return {.rank = mesh.index(comm::Axis::pp), .mesh = &mesh, .tensor = tensor};
}

void run_actions(const PipelineShape& shape, const std::vector<PipelineAction>& actions,
                 const PipelineComm& links, StageComputation& stages) {
  Runner(shape, links, stages).run(actions);
}

}  // namespace capstan::parallel

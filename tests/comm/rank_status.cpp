// The status of the ranks: what is concluded from it, how it is shared by processes and hosts, and what a
// world of real processes says when one of them is at fault.
#include "comm/watchdog/rank_status.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "comm/publishing_communicator.hpp"
#include "comm/watchdog/rank_status_files.hpp"
#include "comm/world.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/processes.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::comm;
using test::holds;

namespace {

RankStatus status(int rank, RankState state, double seconds, Call call = Call::all_gather,
                  int64_t sequence = 31) {
  RankStatus one;
  one.rank = rank, one.pid = 100 + rank, one.host = "h" + std::to_string(rank), one.state = state;
  one.seconds = seconds, one.step = 7, one.phase = "backward", one.call = call, one.group = "dp";
  one.first = 0, one.sequence = sequence, one.bytes = 48;
  one.groups = {{"dp", 0, sequence}};
  return one;
}
std::string found_in(const std::vector<RankStatus>& statuses) {
  const auto error = diagnose_stall(statuses, 10);
  if (!error) return "";
  CHECK(error->code() == ErrorCode::rank_failure);
  return error->what();
}

// A group of one that notes which collective the rank's slot shows when one begins.
class NotingCommunicator final : public Communicator {
 public:
  NotingCommunicator(const Slot& slot, int64_t& shown) : slot_(slot), shown_(shown) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return inner_->name(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    return inner_->split(color, key, name);
  }
  WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    shown_ = slot_.groups[0].sequence.load();
    return inner_->start_all_gather(mine, all, bytes);
  }
  WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    return inner_->start_all_to_all(send, receive, bytes);
  }
  WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    shown_ = slot_.groups[0].sequence.load();
    return inner_->start_broadcast(data, bytes, root);
  }
  WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    return inner_->start_send(data, bytes, to);
  }
  WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return inner_->start_receive(data, bytes, from);
  }
  void barrier() override {}
  int64_t sent_bytes() const override { return 0; }

 private:
  std::unique_ptr<Communicator> inner_ = make_self_communicator("one");
  const Slot& slot_;
  int64_t& shown_;
};

}  // namespace

TEST_CASE("the rank that failed is named") {
  using enum RankState;
  // Work goes on: no rank waits for long, however long another computes.
  CHECK(found_in({status(0, working, 100), status(1, working, 100)}).empty());
  CHECK(found_in({status(0, waiting, 9), status(1, working, 100)}).empty());
  CHECK(found_in({status(0, waiting, 11), status(1, working, 9)}).empty());
  CHECK(found_in({status(0, waiting, 11), status(1, waiting, 9)}).empty());

  const std::string lags = found_in({status(0, waiting, 11), status(1, working, 12, Call::all_gather, 30)});
  CHECK(holds(lags,
              "rank 1 on host `h1` (process 101) lags at step 7, backward: it has been working after "
              "all_gather 30 of group `dp` (48 bytes) for 12.0 s"));
  CHECK(holds(lags, "rank 0 waits for 11.0 s in all_gather 31 of group `dp` (48 bytes), step 7, backward"));
  // Among several the one that has been silent the longest, and a stopped process before all.
  CHECK(holds(found_in({status(0, waiting, 11), status(1, working, 12), status(2, working, 13)}),
              "rank 2 on host"));
  auto stopped = status(1, waiting, 11);
  stopped.stopped = true;
  CHECK(holds(found_in({status(0, waiting, 20), stopped, status(2, working, 30)}),
              "rank 1 on host `h1` (process 101) is stopped"));

  auto gone = status(2, working, 0.1);
  gone.gone = true;
  CHECK(holds(found_in({status(0, waiting, 1), status(1, working, 1), gone}),
              "rank 2 on host `h2` (process 102) is gone at step 7"));
  gone.remote = true;
  CHECK(holds(found_in({status(0, waiting, 1), gone}), "has sent no heartbeat"));
  gone.state = ended;
  CHECK(found_in({status(0, working, 1), gone}).empty());

  // All wait: one has not entered the collective that another waits in.
  const std::string crossed = found_in({status(0, waiting, 11), status(1, waiting, 12, Call::barrier, 30)});
  CHECK(holds(crossed, "rank 1 on host `h1` (process 101) waits in barrier 30 of group `dp` for 12.0 s"));
  auto receive = status(0, waiting, 15, Call::receive, 0);
  receive.peer = 1, receive.group = "pp";
  const std::string missing = found_in({receive, status(1, ended, 3)});
  CHECK(holds(missing, "waits in receive of 48 bytes from rank 1 in group `pp` for 15.0 s"));
  CHECK(holds(missing, "where rank 1 on host `h1` has not called it: it is ended"));
  auto other = status(1, waiting, 12);
  other.bytes = 24;
  CHECK(holds(found_in({status(0, waiting, 11), other}),
              "ranks disagree about collective 31 of group `dp`: rank 0"));
}

TEST_CASE("the rank that failed is named where devices wait for each other without the host") {
  using enum RankState;
  // The host works, the device is in a batch since so many seconds; 0: it is in none.
  const auto with_batch = [](int rank, double seconds, int64_t begun, const std::string& group = "dp") {
    RankStatus one = status(rank, working, 100);
    one.groups = {{"dp", 0, 31, 5, begun, begun}, {"tp", 0, 31, 5, 5, 5}};
    RankStatus::Group& entry = one.groups[group == "dp" ? 0 : 1];
    if (seconds > 0)
      entry.done = entry.begun - 1, entry.seconds = seconds, entry.text = "all_gather of 8 bytes";
    return one;
  };
  CHECK(found_in({with_batch(0, 9, 4), with_batch(1, 0, 3)}).empty());
  CHECK(holds(found_in({with_batch(0, 11, 4), with_batch(1, 0, 3)}),
              "rank 1 on host `h1` (process 101) lags at step 7, backward: the device of rank 0 waits for it "
              "in transfer batch 4 of group `dp` (all_gather of 8 bytes), which its device has not reached"));
  CHECK(holds(found_in({with_batch(0, 11, 6), with_batch(1, 0, 3)}), "which its host has not started"));
  auto stopped = with_batch(1, 3, 5, "tp");
  stopped.groups[0].begun = stopped.groups[0].done = 3;
  // Its device makes progress, unless the process is stopped.
  CHECK(found_in({with_batch(0, 11, 4), stopped}).empty());
  stopped.stopped = true;
  CHECK(holds(found_in({with_batch(0, 11, 4), stopped}),
              "rank 1 on host `h1` (process 101) is stopped at step 7"));
  // From the rank that waits longest to the one that it waits for, and from there to the one at fault.
  auto between = with_batch(1, 12, 5, "tp");
  between.groups[0].begun = between.groups[0].done = 3;
  auto last = with_batch(2, 0, 4);
  last.groups[1].begun = last.groups[1].done = 4;
  const std::string chain = found_in({with_batch(0, 13, 4), between, last});
  CHECK(holds(chain, "rank 2 on host `h2` (process 102) lags"));
  CHECK(holds(chain, "the device of rank 1 waits for it in transfer batch 5 of group `tp`"));
  CHECK(holds(
      chain,
      "rank 0 waits for 13.0 s in transfer batch 4 of group `dp` (all_gather of 8 bytes), step 7, backward"));
  // A device in a batch is no host that has been silent.
  auto elsewhere = status(2, waiting, 20);
  elsewhere.groups.clear();
  CHECK(holds(found_in({with_batch(0, 11, 4), with_batch(1, 12, 4), elsewhere}),
              "transfer batch 4 of group `dp` makes no progress for 12.0 s"));
  const RankStatus sent = with_batch(3, 1.5, 4);
  const auto back = parse_line(format_line(sent));
  REQUIRE(back);
  CHECK(format_line(*back) == format_line(sent));
  CHECK(back->groups[0].text == "all_gather of 8 bytes");
  CHECK(back->groups[0].seconds == doctest::Approx(1.5));
}

TEST_CASE("the table is shared memory; the first to claim reports") {
  const auto status_table = RankStatusTable::create(2, true);
  const auto same = RankStatusTable::open(status_table->path());
  CHECK(same->ranks() == 2);
  CHECK(same->has_parent());
  status_table->unlink();
  CHECK_FALSE(std::filesystem::exists(status_table->path()));
  CHECK_THROWS_AS(RankStatusTable::open(status_table->path()), Error);

  const std::shared_ptr<RankStatusTable> shared = RankStatusTable::create(2, false);
  shared->unlink();
  StatusPublisher publisher(shared, {0, 1}, 1, "here");
  publisher.publish_step(5), publisher.publish_phase("a phase that is longer than it may be");
  const int group = publisher.add_group("tp", 4);
  publisher.publish_call(Call::send, group, 3, 0, 99);
  publisher.publish_state(RankState::waiting);
  const RankStatus seen = shared->read(1, 0);
  CHECK(seen.rank == 1);
  CHECK(seen.pid == ::getpid());
  CHECK(seen.host == "here");
  CHECK(seen.step == 5);
  CHECK(seen.phase == "a phase that is ");
  CHECK(seen.group == "tp");
  CHECK(seen.peer == 3);
  CHECK(seen.bytes == 99);
  CHECK(seen.state == RankState::waiting);
  CHECK(seen.seconds < 60);
  CHECK(shared->read(0, 0).state == RankState::absent);
  publisher.remove_group(group);
  CHECK(shared->read(1, 0).groups.empty());

  CHECK_FALSE(shared->report());
  CHECK(shared->claim_report());
  CHECK_FALSE(shared->claim_report());
  CHECK_FALSE(shared->report());
  shared->write_report(Error(ErrorCode::rank_failure, "what", "help").in("first").in("second"));
  const auto report = shared->report();
  REQUIRE(report);
  CHECK(report->message() == "what");
  CHECK(report->help() == "help");
  CHECK(report->context() == std::vector<std::string>{"first", "second"});
  shared->write_report(Error(ErrorCode::rank_failure, std::string(100'000, 'x')));  // truncated, not overrun
  CHECK(shared->report()->message().size() < 10'000);
}

TEST_CASE("a status survives the way through a file; what is none is left out") {
  RankStatus one = status(3, RankState::waiting, 1.5, Call::broadcast, 12);
  one.heartbeat = 77;
  const auto back = parse_line(format_line(one));
  REQUIRE(back);
  CHECK(format_line(*back) == format_line(one));
  CHECK(back->groups.size() == 1);
  CHECK(back->call == Call::broadcast);
  const std::string line = format_line(one);
  for (size_t n = 0; n < line.size(); ++n) static_cast<void>(parse_line(line.substr(0, n)));
  CHECK_FALSE(parse_line(""));
  CHECK_FALSE(parse_line("a\tb"));
  CHECK_FALSE(parse_line("99999999999999999999" + line));
}

TEST_CASE("a collective is published before it begins") {
  const std::shared_ptr<RankStatusTable> status_table = RankStatusTable::create(1, false);
  status_table->unlink();
  const auto publisher = std::make_shared<StatusPublisher>(status_table, std::vector<int>{0}, 0, "here");
  int64_t shown = -1;
  const auto group =
      make_publishing_communicator(std::make_unique<NotingCommunicator>(publisher->slot(), shown), publisher);
  int32_t mine = 7, all = 0;
  group->broadcast(&mine, sizeof mine, 0);
  CHECK(shown == 1);
  group->all_gather(&mine, &all, sizeof mine);
  CHECK(shown == 2);
}

TEST_CASE("publishing costs less than a microsecond a collective") {
  const std::shared_ptr<RankStatusTable> status_table = RankStatusTable::create(1, false);
  status_table->unlink();
  const auto group = make_publishing_communicator(
      make_self_communicator("one"),
      std::make_shared<StatusPublisher>(status_table, std::vector<int>{0}, 0, "here"));
  constexpr int kCalls = 20000;
  double best = 1;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const int64_t start = monotonic_ns();
    for (int i = 0; i < kCalls; ++i) group->start_broadcast(nullptr, 8, 0)->wait();
    best = std::min(best, 1e-9 * static_cast<double>(monotonic_ns() - start) / kCalls);
  }
  MESSAGE("a published collective that does nothing: " << best * 1e9 << " ns");
#if CAPSTAN_TIMED
  CHECK(best < 1e-6);
#endif
}

// ---- real processes ----

TEST_CASE("ranks that the launcher ends after the first has returned 75 are not reported as gone") {
  const test::TemporaryDirectory directory;
  const std::filesystem::path reports = directory.path() / "reports";
  const test::Ended ended = test::run_ranks(3, CAPSTAN_RANK_AT_FAULT, "slow_end '" + reports.string() + "'");
  CHECK_MESSAGE(ended.code == 75, ended.text);
  CHECK(!std::filesystem::exists(reports));
}

TEST_CASE("late, lost, of another size: a world ends by itself and says why") {
  const auto errors = [](const std::string& text) {
    int count = 0;
    for (size_t at = text.find("error: "); at != std::string::npos; at = text.find("error: ", at + 1))
      ++count;
    return count;
  };
  const std::vector<test::Ended> worlds =
      test::run_worlds(2, CAPSTAN_RANK_AT_FAULT, {"none", "late", "lost", "wrong_size"});
  const test::Ended& fine = worlds[0];
  CHECK_MESSAGE(fine.code == 0, fine.text);
  CHECK_MESSAGE(errors(fine.text) == 0, fine.text);

  const test::Ended& late = worlds[1];
  CHECK_MESSAGE(late.code == 4, late.text);
  CHECK_MESSAGE(errors(late.text) == 1, late.text);
  CHECK_MESSAGE(holds(late.text, "rank 1 on host `"), late.text);
  CHECK_MESSAGE(
      holds(late.text, "lags at step 4, reduce: it has been working after all_to_all 5 of group `dp`"),
      late.text);
  CHECK_MESSAGE(holds(late.text, "rank 0 waits for "), late.text);

  const test::Ended& lost = worlds[2];
  CHECK_MESSAGE(lost.code == 4, lost.text);
  CHECK_MESSAGE(holds(lost.text, "group `dp`"), lost.text);
  CHECK_MESSAGE(holds(lost.text, "ranks disagree about collective 6"), lost.text);

  const test::Ended& size = worlds[3];
  CHECK_MESSAGE(size.code == 4, size.text);
  CHECK_MESSAGE(holds(size.text, "ranks disagree about collective 6 of group `dp`"), size.text);
  CHECK_MESSAGE(holds(size.text, " 32 bytes"), size.text);
  CHECK_MESSAGE(holds(size.text, " 64 bytes"), size.text);
}

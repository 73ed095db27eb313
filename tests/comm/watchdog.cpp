// The watchdog's thread, of several hosts in one process.
#include "comm/watchdog/watchdog.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "comm/publishing_communicator.hpp"
#include "comm/watchdog/rank_status.hpp"
#include "tests/support/errors.hpp"

using namespace capstan;
using namespace capstan::comm;
using test::holds;
using namespace std::chrono_literals;

TEST_CASE("hosts see each other through files: one that falls silent is reported, once") {
  const auto directory =
      std::filesystem::temp_directory_path() / ("capstan-hosts-" + std::to_string(::getpid()));
  RankStatusFiles::clear(directory);
  // Two hosts in one process: each has its table, its rank and its watchdog.
  struct Host {
    std::shared_ptr<RankStatusTable> status_table = RankStatusTable::create(1, false);
    std::unique_ptr<StatusPublisher> publisher;
    std::unique_ptr<Watchdog> watchdog;
    std::string reported;
    std::atomic<bool> left = false;
    Host(const std::filesystem::path& directory, int rank) {
      status_table->unlink();
      publisher = std::make_unique<StatusPublisher>(
          status_table, rank == 0 ? std::vector<int>{0, -1} : std::vector<int>{-1, 0}, rank,
          "host" + std::to_string(rank));
      watchdog = std::make_unique<Watchdog>(
          *status_table, 0,
          FailureWatch{0.4, [this](const Error& error) { reported = error.what(); },
                       [this] { left = true; }});
      watchdog->watch_other_hosts(std::make_unique<RankStatusFiles>(directory, rank, std::vector<int>{0, 1}));
    }
  };
  const auto wait_for = [](const auto& condition) {
    for (int i = 0; i < 1000 && !condition(); ++i) std::this_thread::sleep_for(10ms);
  };
  {
    Host a(directory, 0), b(directory, 1);
    std::this_thread::sleep_for(1s);
    CHECK_FALSE(a.left);  // both live
    CHECK_FALSE(b.left);
    b.watchdog.reset();  // as if the host had gone down
    wait_for([&] { return a.left.load(); });
    REQUIRE(a.left);
    CHECK_MESSAGE(holds(a.reported, "rank 1 on host `host1`"), a.reported);
    CHECK_MESSAGE(holds(a.reported, "has sent no heartbeat"), a.reported);
  }
  RankStatusFiles::clear(directory);
  {
    Host a(directory, 0), b(directory, 1);
    a.publisher->publish_state(RankState::waiting);  // for rank 1, which runs and does not call it
    wait_for([&] { return a.left && b.left; });
    REQUIRE((a.left && b.left));
    const int reported = !a.reported.empty() + !b.reported.empty();
    CHECK(reported == 1);
    CHECK_MESSAGE(holds(a.reported + b.reported, "rank 1 on host `host1`"), (a.reported + b.reported));
    CHECK_MESSAGE(holds(a.reported + b.reported, " lags at step 0"), (a.reported + b.reported));
  }
  std::filesystem::remove_all(directory);
}

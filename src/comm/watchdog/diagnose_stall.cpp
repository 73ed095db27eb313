// Who is to blame when a world stands still, from the ranks' posts alone.
#include <algorithm>

#include "base/text.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

namespace {

std::string rank_text(const Post& post) {
  return "rank " + std::to_string(post.rank) + " on host `" + post.host + "` (process " +
         std::to_string(post.pid) + ")";
}
// "all_gather 31 of group `dp` (48 bytes)", "receive of 48 bytes from rank 3 in group `pp`"
std::string call_text(const Post& post) {
  const std::string call(name_of(post.call)), group = "group `" + post.group + "`";
  switch (post.call) {
    case Call::none:
      return "no collective yet";
    case Call::finalize:
      return "the end of the run";
    case Call::send:
    case Call::receive:
      return call + " of " + std::to_string(post.bytes) + " bytes " +
             (post.call == Call::send ? "to" : "from") + " rank " + std::to_string(post.peer) + " in " +
             group;
    case Call::barrier:
    case Call::split:
      return call + " " + std::to_string(post.sequence) + " of " + group;
    default:
      return call + " " + std::to_string(post.sequence) + " of " + group + " (" + std::to_string(post.bytes) +
             " bytes)";
  }
}
std::string place_text(const Post& post) {
  return "step " + std::to_string(post.step) + (post.phase.empty() ? "" : ", " + post.phase);
}
std::string state_text(const Post& post) {
  if (post.doing == Doing::waiting) return "in " + call_text(post);
  if (post.doing == Doing::ended) return "ended";
  return post.call == Call::none ? "before its first collective" : "working after " + call_text(post);
}

// What the others do, the longest waiting first; a large world is cut short.
void add_others(Error& error, std::vector<Post> posts, int except) {
  constexpr size_t kMost = 8;
  std::erase_if(posts, [&](const Post& post) { return post.rank == except || post.doing == Doing::absent; });
  std::stable_sort(posts.begin(), posts.end(), [](const Post& a, const Post& b) {
    const bool first = a.doing == Doing::waiting, second = b.doing == Doing::waiting;
    return first != second ? first : a.seconds > b.seconds;
  });
  for (size_t i = 0; i < std::min(posts.size(), kMost); ++i) {
    const Post& post = posts[i];
    error.in("rank " + std::to_string(post.rank) +
             (post.doing == Doing::waiting
                  ? " waits for " + fixed(post.seconds, 1) + " s in " + call_text(post)
                  : " is " + state_text(post)) +
             ", " + place_text(post));
  }
  if (posts.size() > kMost) error.in("and " + std::to_string(posts.size() - kMost) + " more ranks");
}

bool counted(Call call) {
  return call != Call::none && call != Call::send && call != Call::receive && call != Call::finalize;
}

// The rank that keeps `waiter` from going on: the one it receives from or sends to, or the member of its group that has entered
// the fewest collectives of it. Null: everybody it needs is there.
const Post* awaited(const Post& waiter, const std::vector<Post>& posts) {
  const Post* found = nullptr;
  int64_t fewest = waiter.sequence;
  for (const Post& post : posts) {
    if (post.rank == waiter.rank) continue;
    if (waiter.peer >= 0) {
      if (post.rank == waiter.peer) return &post;
      continue;
    }
    for (const Post::Group& group : post.groups)
      if (counted(waiter.call) && group.name == waiter.group && group.first == waiter.first &&
          group.sequence < fewest)
        found = &post, fewest = group.sequence;
  }
  return found;
}

// Members that entered the same collective of a group and asked for different things.
std::optional<Error> mismatch(const std::vector<Post>& posts) {
  for (const Post& a : posts)
    for (const Post& b : posts)
      if (a.rank < b.rank && a.doing == Doing::waiting && b.doing == Doing::waiting && counted(a.call) &&
          counted(b.call) && a.group == b.group && a.first == b.first && a.sequence == b.sequence &&
          asked_of(a.call, a.bytes) != asked_of(b.call, b.bytes)) {
        Error error(ErrorCode::rank_failure, "ranks disagree about collective " + std::to_string(a.sequence) +
                                                 " of group `" + a.group + "`: " + rank_text(a) + " is in " +
                                                 call_text(a) + ", " + rank_text(b) + " in " + call_text(b));
        error.in(place_text(a) + " on rank " + std::to_string(a.rank) + ", " + place_text(b) + " on rank " +
                 std::to_string(b.rank));
        return error;
      }
  return std::nullopt;
}

}  // namespace

std::optional<Error> judge(const std::vector<Post>& posts, double timeout) {
  const std::string resume = "`--resume` goes on from the newest checkpoint";
  for (const Post& post : posts) {
    if (!post.gone || post.doing == Doing::ended || post.doing == Doing::absent) continue;
    Error error(ErrorCode::rank_failure,
                rank_text(post) + (post.remote ? " gives no sign of life at " : " is gone at ") +
                    place_text(post) + ": it was " + state_text(post),
                (post.remote ? "its host or the network to it may be down; "
                             : "the system's log says whether it took too much memory; ") +
                    resume);
    add_others(error, posts, post.rank);
    return error;
  }

  const Post *waiter = nullptr, *lagging = nullptr;
  bool all_wait = true;
  for (const Post& post : posts) {
    if (post.doing == Doing::waiting && post.seconds >= timeout &&
        (!waiter || post.seconds > waiter->seconds))
      waiter = &post;
    if (post.doing == Doing::working || (post.doing == Doing::waiting && post.seconds < timeout))
      all_wait = false;
  }
  if (!waiter) return std::nullopt;
  // A stopped process first, wherever it was stopped; then whoever has been silent the longest.
  for (const Post& post : posts) {
    const bool silent = post.doing == Doing::working && post.seconds >= timeout;
    if (!(post.stopped || silent) || post.doing == Doing::ended || post.doing == Doing::absent) continue;
    if (!lagging || (post.stopped && !lagging->stopped) ||
        (post.stopped == lagging->stopped && post.seconds > lagging->seconds))
      lagging = &post;
  }
  if (lagging) {
    Error error(ErrorCode::rank_failure,
                rank_text(*lagging) + (lagging->stopped ? " is stopped" : " lags") + " at " +
                    place_text(*lagging) + ": it has been " + state_text(*lagging) + " for " +
                    fixed(lagging->seconds, 1) + " s, and the others wait (resilience.timeout " +
                    fixed(timeout, 1) + " s)",
                lagging->stopped ? "SIGSTOP, a debugger or a batch system has stopped it; " + resume
                                 : "a higher resilience.timeout where such a step is no fault; " + resume);
    add_others(error, posts, lagging->rank);
    return error;
  }
  if (!all_wait) return std::nullopt;
  if (auto error = mismatch(posts)) {
    error->in("each has waited for resilience.timeout " + fixed(timeout, 1) + " s");
    return error;
  }
  const Post* missing = awaited(*waiter, posts);
  Error error(ErrorCode::rank_failure,
              rank_text(*waiter) + " waits in " + call_text(*waiter) + " for " + fixed(waiter->seconds, 1) +
                  " s at " + place_text(*waiter) +
                  (missing ? ", where rank " + std::to_string(missing->rank) + " on host `" + missing->host +
                                 "` does not come: it is " + state_text(*missing)
                           : ", though all members are there: a message was lost"),
              resume);
  add_others(error, posts, waiter->rank);
  return error;
}

}  // namespace capstan::comm

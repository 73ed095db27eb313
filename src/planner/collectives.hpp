// Time of collectives and transfers: latency and bandwidth, within a fast domain (NVLink) and between domains
// (network). Formulas: docs/planning.md, Communication.
#pragma once

#include "planner/cluster.hpp"

namespace capstan::planner {

// The ranks of a communicator on the cluster.
struct Group {
  int64_t size = 1;
  // Ranks of the group in the fast domain that has the fewest of them: each drives its own network adapter,
  // and the others wait for them.
  int64_t local = 1;
  int64_t domains = 1;
  bool crosses_domains() const { return domains > 1; }
};

// GPUs of each fast domain that a run on `gpus` GPUs takes, in the order of ranks: as many nodes of every
// domain, as schedulers give them (Slurm: --segment), where more than half of a domain's can be the same
// number; else all of one domain after another.
int64_t gpus_of_domain(const Cluster& cluster, int64_t gpus);

// `size` ranks at a distance of `stride` global ranks, of a run on `gpus` GPUs. Of all such groups the one
// that is spread the most, as the others wait for it.
Group group_of(const Cluster& cluster, int64_t stride, int64_t size, int64_t gpus);

enum class Collective : uint8_t { all_gather, reduce_scatter, all_reduce, all_to_all };

// Seconds of a collective. bytes: the full tensor, which an all-gather leaves on every rank; of an all-to-all
// all that one rank sends, to itself included.
double collective_seconds(const Cluster& cluster, const Group& group, Collective collective, double bytes);
// The same of several, one after the other; bytes: of all together.
inline double collectives_seconds(const Cluster& cluster, const Group& group, Collective collective,
                                  double bytes, double count) {
  return count > 0 ? count * collective_seconds(cluster, group, collective, bytes / count) : 0;
}

// Seconds until the tokens of each rank are on the ranks of their topk experts, where a fast domain gets one
// copy of a token and hands it to its ranks. bytes: of the tokens of one rank, once. group_topk: fast domains
// that a token can reach; 0: all. Experts are chosen independently of each other, and a copy takes one step.
double dispatch_seconds(const Cluster& cluster, const Group& group, double bytes, int64_t topk,
                        int64_t group_topk);

// Seconds until `bytes` from one rank are on another one, of the same fast domain or not.
double transfer_seconds(const Cluster& cluster, bool crosses_domains, double bytes);

}  // namespace capstan::planner

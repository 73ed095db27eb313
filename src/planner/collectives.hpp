// Time of collectives and transfers: latency and bandwidth, within a fast domain (NVLink) and between domains
// (network). Formulas: docs/planning.md, Communication.
#pragma once

#include "planner/cluster.hpp"

namespace capstan::planner {

// The ranks of a communicator on the cluster.
struct Group {
  int64_t size = 1;
  // Ranks of the group that share a fast domain. Each drives its own network adapter.
  int64_t local = 1;
  int64_t domains() const { return (size + local - 1) / local; }
  bool crosses_domains() const { return domains() > 1; }
};

// `size` ranks at a distance of `stride` global ranks.
Group group_of(const Cluster& cluster, int64_t stride, int64_t size);

enum class Collective : uint8_t { all_gather, reduce_scatter, all_reduce, all_to_all };

// Seconds of a collective. bytes: the full tensor, which an all-gather leaves on every rank; of an all-to-all
// all that one rank sends, to itself included.
double collective_seconds(const Cluster& cluster, const Group& group, Collective collective, double bytes);

// Seconds until `bytes` from one rank are on another one, of the same fast domain or not.
double transfer_seconds(const Cluster& cluster, bool crosses_domains, double bytes);

}  // namespace capstan::planner

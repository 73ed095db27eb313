#include "planner/collectives.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/division.hpp"
#include "base/text.hpp"

namespace capstan::planner {

namespace {

constexpr double kGiga = 1e9, kMicro = 1e-6;

// Bytes per second of one rank to the others of its domain.
double intra_rate(const Cluster& c, int64_t local) {
  double rate = c.intra_bandwidth;
  if (c.intra_peer_bandwidth)
    rate = std::min(rate, *c.intra_peer_bandwidth * static_cast<double>(std::max<int64_t>(1, local - 1)));
  return kGiga * rate * c.intra_efficiency;
}

// Bytes per second of one rank to other domains. A measured bus bandwidth is that of all GPUs of a node
// together; between two measured numbers of nodes it is interpolated by their logarithm.
double inter_rate(const Cluster& c, double nodes, bool gathers = false) {
  const BandwidthByNodes& measured = gathers && !c.gather_bandwidth_by_nodes.empty()
                                         ? c.gather_bandwidth_by_nodes
                                         : c.bus_bandwidth_by_nodes;
  if (measured.empty()) return kGiga * c.inter_bandwidth * c.inter_efficiency;
  const auto at = [&](size_t i) {
    return std::pair(std::log(static_cast<double>(parse_int(measured[i].first).value())), measured[i].second);
  };
  const double wanted = std::log(nodes);
  size_t upper = 0;
  while (upper < measured.size() && at(upper).first < wanted) ++upper;
  double bus = 0;
  if (upper == 0 || upper == measured.size()) {
    bus = measured[upper == 0 ? 0 : upper - 1].second;
  } else {
    const auto [x0, y0] = at(upper - 1);
    const auto [x1, y1] = at(upper);
    bus = y0 + (y1 - y0) * (wanted - x0) / (x1 - x0);
  }
  return kGiga * bus / static_cast<double>(c.gpus_per_node);
}

// Seconds of a ring all-gather or reduce-scatter over `ranks`.
double ring(double ranks, double latency, double bytes, double rate) {
  return (ranks - 1) * latency + (ranks - 1) / ranks * bytes / rate;
}

}  // namespace

int64_t gpus_of_domain(const Cluster& cluster, int64_t gpus) {
  const int64_t node = cluster.gpus_per_node, most = cluster.fast_domain() / node;
  for (int64_t nodes = most; 2 * nodes > most; --nodes)
    if (gpus % (nodes * node) == 0) return nodes * node;
  return cluster.fast_domain();
}

Group group_of(const Cluster& cluster, int64_t stride, int64_t size, int64_t gpus) {
  const int64_t domain = gpus_of_domain(cluster, gpus), block = stride * size;
  if (size <= 1) return {};
  // Blocks of ranks that domains divide evenly, or that divide domains.
  if (domain % block == 0) return {size, size, 1};
  if (block % domain == 0 && domain % stride == 0) return {size, domain / stride, block / domain};
  if (stride % domain == 0) return {size, 1, size};
  Group widest{size, size, 1};
  // The position of a block in its domain repeats.
  const int64_t end = std::min(std::lcm(block, domain), std::max(gpus, block));
  for (int64_t begin = 0; begin + block <= end; begin += block)
    for (int64_t first = begin; first < begin + stride; ++first) {
      int64_t domains = 0;
      for (int64_t rank = first; rank < begin + block; ++domains) {
        const int64_t next = (rank / domain + 1) * domain;
        const int64_t local = ceil_div(std::min(next, begin + block) - rank, stride);
        widest.local = std::min(widest.local, local);
        rank += local * stride;
      }
      widest.domains = std::max(widest.domains, domains);
    }
  return widest;
}

double collective_seconds(const Cluster& c, const Group& group, Collective collective, double bytes) {
  if (group.size <= 1 || bytes <= 0) return 0;
  const auto local = static_cast<double>(group.local), domains = static_cast<double>(group.domains),
             size = static_cast<double>(group.size);
  const double intra = kMicro * c.intra_latency, inter = kMicro * c.inter_latency;
  // Fast domains in units of nodes, for a measured bus bandwidth.
  const int64_t nodes_of_domain = c.fast_domain() / c.gpus_per_node;
  const double nodes = domains * static_cast<double>(nodes_of_domain);
  if (collective == Collective::all_to_all) {
    const double inside = bytes * (local - 1) / size / intra_rate(c, group.local);
    const double outside = bytes * (size - local) / size / inter_rate(c, nodes);
    return (local - 1) * intra + (size - local) * inter / local + std::max(inside, outside);
  }
  const double inside = ring(local, intra, bytes, intra_rate(c, group.local));
  const double slice = bytes / local;
  const double rate = inter_rate(c, nodes, collective != Collective::all_reduce);
  const double outside = group.crosses_domains() ? ring(domains, inter, slice, rate) : 0;
  if (collective != Collective::all_reduce) return inside + outside;
  // Between domains a tree has fewer steps than a ring, which moves fewer bytes.
  const double tree = group.crosses_domains() ? 2 * std::log2(domains) * inter + 2 * slice / rate : 0;
  return 2 * inside + std::min(2 * outside, tree);
}

double dispatch_seconds(const Cluster& c, const Group& group, double bytes, int64_t topk,
                        int64_t group_topk) {
  // How many of n equal places topk independent choices reach.
  const auto reached = [&](double n) { return n * (1 - std::pow(1 - 1 / n, static_cast<double>(topk))); };
  const auto local = static_cast<double>(group.local), domains = static_cast<double>(group.domains),
             size = static_cast<double>(group.size);
  const int64_t nodes_of_domain = c.fast_domain() / c.gpus_per_node;
  double copies = reached(domains);
  if (group_topk > 0) copies = std::min(copies, static_cast<double>(group_topk));
  const double inside = reached(size) * (local - 1) / local * bytes / intra_rate(c, group.local);
  const double outside = group.crosses_domains()
                             ? copies * (domains - 1) / domains * bytes /
                                   inter_rate(c, domains * static_cast<double>(nodes_of_domain))
                             : 0;
  return kMicro * (c.intra_latency + (group.crosses_domains() ? c.inter_latency : 0)) +
         std::max(inside, outside);
}

double transfer_seconds(const Cluster& c, bool crosses_domains, double bytes) {
  return crosses_domains ? kMicro * c.inter_latency + bytes / inter_rate(c, 2)
                         : kMicro * c.intra_latency + bytes / intra_rate(c, 2);
}

}  // namespace capstan::planner

// Tensors made of rows of other tensors: how the parameters of one program lie in the files of another. One table serves both
// directions: inverted() of what reads is what writes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"

namespace capstan::interchange {

// The slices [begin, begin + count) of the target are slices of the source, in their order.
struct Run {
  std::string source;
  int64_t begin = 0, source_begin = 0, count = 0;
};

// One target of one or two dimensions. Cells that no run covers are zero.
struct Arrangement {
  Shape shape;
  size_t dimension = 0, source_dimension = 0;  // along which the runs go; different: each slice is transposed
  std::vector<Run> runs;                       // by begin, without overlap
  double add = 0;  // to every value, before it is rounded to the type that is asked for
};

struct ArrangementTable {
  std::map<std::string, Arrangement, std::less<>> targets;
  std::map<std::string, Shape, std::less<>> sources;  // every tensor that a run names, with its shape
};
ArrangementTable inverted(const ArrangementTable& table);

// The targets of a table, read from a source. A target's element type is that of its sources; fp32 where they differ, or where
// something is added to them.
struct RearrangedTensor : checkpoint::TensorInfo {
  Arrangement arrangement;
};
class RearrangedSource final : public checkpoint::MapSource<RearrangedTensor> {
 public:
  // All that is missing or of another shape, at once: ErrorCode::format. Keeps a reference to `source`.
  RearrangedSource(checkpoint::TensorSource& source, ArrangementTable table);

  std::string place() const override { return source_.place(); }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  void read_runs(const Arrangement& target, DType dtype, const Region& wanted, std::span<std::byte> out);

  checkpoint::TensorSource& source_;
  std::vector<std::byte> slice_;  // transposed slices on their way
};

}  // namespace capstan::interchange

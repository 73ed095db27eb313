// Tensors assembled from rows of other tensors: maps the parameters of one program to the files of another.
// The inverted() table maps the other way.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"

namespace capstan::formats {

// `count` slices of the target, from `begin` on and `step` apart, are slices of the source, in their order.
struct Segment {
  std::string source;
  int64_t begin = 0, source_begin = 0, count = 0;
  int64_t step = 1, source_step = 1;
};

// A target tensor of one to three dimensions. Elements that no segment covers are zero. The segments of a
// tensor of three dimensions, target or source, count the slices of all its matrices in their order, and each
// lies in one matrix.
struct Arrangement {
  Shape shape;
  // Dimensions that the segments slice: rows or columns. If they differ, slices are transposed.
  size_t dimension = 0, source_dimension = 0;
  // Sorted by `begin`, without overlap.
  std::vector<Segment> segments;
  // A constant that is added to every value before rounding to the requested type.
  double add = 0;
};

struct ArrangementTable {
  std::map<std::string, Arrangement, std::less<>> targets;
  // Shapes of the source tensors that the segments name.
  std::map<std::string, Shape, std::less<>> sources;
};
ArrangementTable inverted(const ArrangementTable& table);

// The targets of a table, read from a source. A target has the element type of its sources; fp32 where these
// differ or `add` is not 0.
struct RearrangedTensor : checkpoint::TensorInfo {
  Arrangement arrangement;
};
class RearrangedSource final : public checkpoint::MapSource<RearrangedTensor> {
 public:
  // Throws ErrorCode::format with all tensors that are missing or have another shape, and `help`. Keeps a
  // reference to `source`.
  RearrangedSource(checkpoint::TensorSource& source, ArrangementTable table, const std::string& help = {});

  std::string description() const override { return source_.description(); }
  void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) override;

 private:
  // `wanted`: in the matrix of all rows.
  void read_segments(const Arrangement& target, DType dtype, const Region& wanted, std::span<std::byte> out);
  void read_segment(const Arrangement& target, const Segment& segment, DType dtype, const Region& wanted,
                    std::span<std::byte> out);
  // `wanted`: in the matrix of all slices, which are along `dimension`.
  void read_source(const std::string& name, size_t dimension, DType dtype, const Region& wanted,
                   std::span<std::byte> out);

  checkpoint::TensorSource& source_;
  // Buffer of slices that are copied one by one.
  std::vector<std::byte> slice_;
};

}  // namespace capstan::formats

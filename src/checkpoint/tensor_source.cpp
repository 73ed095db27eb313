#include "checkpoint/tensor_source.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

const TensorInfo& TensorSource::at(std::string_view name) const {
  if (const auto* tensor = find(name)) return *tensor;
  const auto all = names();
  const auto near = near_matches(name, all);
  fail(ErrorCode::not_found, place() + " has no tensor " + capstan::quoted(name),
       near.empty() ? "" : "near names: " + join(near, ", "));
}

void TensorSource::read_whole(std::string_view name, DType dtype, std::span<std::byte> out) {
  read(name, dtype, whole(at(name).shape), out);
}

}  // namespace capstan::checkpoint

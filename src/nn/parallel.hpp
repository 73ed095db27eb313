// The ranks among which the layers of a model are cut, as layers see them. Null or a group of one: not cut.
#pragma once

#include <cstdint>

#include "comm/communicator.hpp"

namespace capstan::nn {

struct Parallel {
  comm::Communicator* tensor = nullptr;
  // Between the cut products each tensor rank holds an equal run of the rows (norms, dropout, residuals); else all rows.
  bool sequence = false;
  // Parts of a product whose collective runs beside the next part's product; 1: one after the other.
  int64_t splits = 1;

  int tensor_size() const { return tensor ? tensor->size() : 1; }
  int tensor_rank() const { return tensor ? tensor->rank() : 0; }
  bool cuts_rows() const { return sequence && tensor_size() > 1; }
};

}  // namespace capstan::nn

#include "data/later_tokens.hpp"

#include <doctest/doctest.h>

using namespace capstan::data;

namespace {

MicroBatch two_rows() {
  MicroBatch batch = MicroBatch::zeros(2, 6);
  for (int32_t i = 0; i < 12; ++i) {
    const auto at = static_cast<size_t>(i);
    batch.tokens[at] = 100 + i;
    batch.labels[at] = 101 + i;
    batch.position_ids[at] = i % 6;
    batch.loss_mask[at] = i == 1 || i == 9 ? 0.0f : 1.0f;
  }
  return batch;
}

using Ids = std::vector<int32_t>;
using Weights = std::vector<float>;

}  // namespace

TEST_CASE("later tokens are those of the same row; where there is none, there is no loss") {
  MicroBatch batch = two_rows();
  batch.cu_seqlens = {{0, 6}, {0, 6}};
  const LaterTokens one = later_tokens(batch, 1);
  CHECK(one.tokens == Ids{101, 102, 103, 104, 105, 0, 107, 108, 109, 110, 111, 0});
  CHECK(one.labels == Ids{102, 103, 104, 105, 106, 0, 108, 109, 110, 111, 112, 0});
  CHECK(one.position_ids == Ids{1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0});
  // Four loss tokens of a row weigh as much as its five had.
  const auto w = static_cast<float>(5.0 / 4.0);
  CHECK(one.loss_mask == Weights{0, w, w, w, w, 0, w, w, 0, w, w, 0});
  const LaterTokens two = later_tokens(batch, 2);
  CHECK(two.tokens == Ids{102, 103, 104, 105, 0, 0, 108, 109, 110, 111, 0, 0});
  CHECK(two.loss_mask[0] == w);
  CHECK(two.loss_mask[6] == static_cast<float>(5.0 / 3.0));
}

TEST_CASE("later tokens stay in their document where attention does") {
  MicroBatch batch = two_rows();
  batch.cu_seqlens = {{0, 2, 6}, {0, 5, 6}};
  const LaterTokens one = later_tokens(batch, 1);
  CHECK(one.tokens == Ids{101, 0, 103, 104, 105, 0, 107, 108, 109, 110, 0, 0});
  CHECK(one.labels == Ids{102, 0, 104, 105, 106, 0, 108, 109, 110, 111, 0, 0});
  const auto first = static_cast<float>(5.0 / 3.0);
  CHECK(one.loss_mask == Weights{0, 0, first, first, first, 0, first, first, 0, first, 0, 0});
}

TEST_CASE("a row without later loss tokens has no loss") {
  MicroBatch batch = two_rows();
  batch.loss_mask = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const LaterTokens one = later_tokens(batch, 1);
  CHECK(one.loss_mask == Weights(12));
  CHECK(later_tokens(batch, 6).tokens == Ids(12));
  CHECK(later_tokens(batch, 7).tokens == Ids(12));
}

#include "importers/batch.hpp"

#include "base/checked.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan::importers {

namespace {

// Larger sizes are errors of the resolved recipe.
constexpr int64_t kMaxSamples = int64_t{1} << 30;

}  // namespace

Layout layout_of_base(const Draft& draft) {
  Layout layout;
  if (!draft.extends()) return layout;
  config::Request request;
  request.recipe = draft.base();
  for (const std::string& path : draft.paths_of("dist"))
    request.overrides.push_back(config::Override::token(path + "=" + draft.text(path)));
  const config::DistConfig dist = config::resolve(request).config.dist;
  if (dist.data_parallel_size && *dist.data_parallel_size > 0)
    layout.data_parallel_size = *dist.data_parallel_size;
  for (const int64_t size :
       {dist.tensor_model_parallel_size, dist.pipeline_model_parallel_size, dist.context_parallel_size})
    if (const auto ranks = try_mul(layout.ranks_of_replica, size); ranks && *ranks > 0)
      layout.ranks_of_replica = *ranks;
  return layout;
}

void set_global_batch(Reader& reader, int64_t each, const std::string& product, std::string_view key) {
  const std::string path = "train.global_batch_size";
  const int64_t ranks = layout_of_base(reader.draft).data_parallel_size;
  const auto together = try_mul(each, ranks);
  const bool multiplied = ranks > 1 && together && *together <= kMaxSamples;
  const std::string value = std::to_string(multiplied ? *together : each);
  const std::string note = product + (multiplied ? " times the " + std::to_string(ranks) +
                                                       " data-parallel ranks of the base recipe"
                                                 : " on one data-parallel rank; multiply by their number");
  if (key.empty()) {
    reader.draft.assume(path, value, note);
    return;
  }
  reader.set(path, value, key, note);
  if (!multiplied) reader.draft.list_as_assumed(path, note);
}

}  // namespace capstan::importers

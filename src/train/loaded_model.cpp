#include "train/loaded_model.hpp"

#include "checkpoint/reader.hpp"
#include "train/state.hpp"

namespace capstan::train {

std::shared_ptr<LoadedModel> load_model(const std::filesystem::path& checkpoint,
                                        const config::Config& config) {
  auto reader = checkpoint::Reader::open(checkpoint, checkpoint::Depth::content);
  auto result = std::make_shared<LoadedModel>();
  result->config = config;
  config::Config& own = result->config;
  if (own.tokenizer.tokenizer_type != config::TokenizerKind::none &&
      own.tokenizer.tokenizer_type != config::TokenizerKind::byte && reader.has_file("tokenizer.json")) {
    own.tokenizer.tokenizer_type = config::TokenizerKind::huggingface;
    const auto path = (checkpoint / "tokenizer.json").string();
    own.tokenizer.tokenizer_model = config::Path{path, path};
  }
  result->tokenizer = load_tokenizer(own);
  result->device = make_device(own.train.device, own.train.threads.value_or(0), 1);
  result->self = comm::make_self_communicator("self");
  result->model = models::build(own.model);
  result->store = std::make_unique<parallel::FlatStore>(
      *result->device, result->model->parameters(), parallel::StoreGroups(),
      parallel::FlatStore::Options{.compute = compute_type(own.mixed_precision), .gradients = false});
  load_parameters(reader, *result->store);
  return result;
}

}  // namespace capstan::train

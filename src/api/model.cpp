#include "capstan/model.hpp"

#include <algorithm>
#include <numeric>

#include "api/config_impl.hpp"
#include "base/error.hpp"
#include "train/inference/evaluate.hpp"
#include "train/inference/generate.hpp"
#include "train/inference/loaded_model.hpp"
#include "train/setup/stored_recipe.hpp"

namespace capstan {

struct Model::Impl {
  std::unique_ptr<comm::World> world;
  std::unique_ptr<train::LoadedModel> loaded;
  std::vector<std::string> warnings;

  const config::ModelConfig& model() const { return loaded->config().model; }
};

namespace {

Generated run_generation(train::LoadedModel& model, train::GenerateOptions request,
                         const GenerateOptions& options) {
  Generated generated;
  // Text that no call of on_token has had.
  std::string waiting;
  request.max_tokens = options.max_tokens;
  request.temperature = options.temperature;
  request.top_k = options.top_k;
  request.top_p = options.top_p;
  request.seed = options.seed;
  request.stop_at_eod = options.stop_at_eod;
  request.on_text = [&](const std::string& text) {
    generated.text += text;
    waiting += text;
  };
  if (options.on_token)
    request.on_token = [&](int32_t id) { return options.on_token(id, std::exchange(waiting, {})); };
  train::GenerateResult result = train::generate(model, request);
  if (options.on_token && !waiting.empty()) options.on_token(-1, waiting);
  generated.ids = std::move(result.ids);
  generated.prompt_tokens = result.prompt_tokens;
  generated.ended = result.ended;
  generated.stopped = result.stopped;
  generated.prompt_seconds = result.prompt_seconds;
  generated.seconds = result.seconds;
  return generated;
}

void check_ids(std::span<const int32_t> ids, int64_t vocabulary, int64_t positions) {
  if (ids.empty()) fail(ErrorCode::usage, "a sequence has no tokens");
  if (static_cast<int64_t>(ids.size()) > positions)
    fail(ErrorCode::usage, "a sequence has " + std::to_string(ids.size()) + " tokens, the model " +
                               std::to_string(positions) + " positions");
  for (const int32_t id : ids)
    if (id < 0 || id >= vocabulary)
      fail(ErrorCode::usage, "a sequence has token id " + std::to_string(id) + ", the model " +
                                 std::to_string(vocabulary) + " tokens (model.vocab_size)");
}

// A row for each sequence, [rows, longest sequence]. Padding follows the tokens, which do not attend to it.
data::MicroBatch padded_batch(std::span<const std::vector<int32_t>> sequences) {
  size_t longest = 0;
  for (const auto& ids : sequences) longest = std::max(longest, ids.size());
  data::MicroBatch batch = data::MicroBatch::zeros(std::ssize(sequences), static_cast<int64_t>(longest));
  for (size_t row = 0; row < sequences.size(); ++row) {
    const auto begin = static_cast<std::ptrdiff_t>(row * longest);
    std::copy(sequences[row].begin(), sequences[row].end(), batch.tokens.begin() + begin);
    std::iota(batch.position_ids.begin() + begin,
              batch.position_ids.begin() + begin + static_cast<std::ptrdiff_t>(longest), 0);
  }
  return batch;
}

}  // namespace

Model Model::load(const std::string& name, const LoadOptions& options) {
  train::StoredRecipe stored = train::stored_recipe(name, overrides_of(options.overrides), 1);
  try {
    stored.resolution.require_ok();
  } catch (Error& error) {
    throw error.in("in the recipe of `" + stored.checkpoint.string() + "`");
  }
  auto impl = std::make_shared<Impl>();
  impl->world = comm::World::single_process();
  impl->warnings = std::move(stored.refused);
  impl->loaded = std::make_unique<train::LoadedModel>(stored.checkpoint, stored.resolution.config,
                                                      *impl->world, options.adapter);
  return Model(std::move(impl));
}

const std::vector<std::string>& Model::warnings() const {
  return impl_->warnings;
}

int64_t Model::vocab_size() const {
  return impl_->model().vocab_size;
}

int64_t Model::context_length() const {
  const config::ModelConfig& model = impl_->model();
  return model.max_position_embeddings.value_or(model.seq_length);
}

bool Model::has_tokenizer() const {
  return impl_->loaded->tokenizer() != nullptr;
}

std::vector<int32_t> Model::encode(std::string_view text) const {
  const text::Tokenizer& tokenizer = impl_->loaded->require_tokenizer();
  std::vector<int32_t> ids = tokenizer.before();
  tokenizer.encode(text, ids);
  return ids;
}

std::string Model::decode(std::span<const int32_t> ids) const {
  return impl_->loaded->require_tokenizer().decode(ids, true);
}

std::vector<float> Model::logits(std::span<const int32_t> ids) {
  return std::move(logits_batch({{ids.begin(), ids.end()}}).front());
}

std::vector<std::vector<float>> Model::logits_batch(const std::vector<std::vector<int32_t>>& sequences) {
  // The number of logits computed at once.
  constexpr int64_t kMaxPassLogits = int64_t{1} << 26;
  const int64_t vocabulary = vocab_size();
  int64_t longest = 1;
  for (const auto& ids : sequences) {
    check_ids(ids, vocabulary, context_length());
    longest = std::max(longest, static_cast<int64_t>(ids.size()));
  }
  const auto rows = static_cast<size_t>(std::max<int64_t>(1, kMaxPassLogits / (longest * vocabulary)));
  std::vector<std::vector<float>> results;
  for (size_t first = 0; first < sequences.size(); first += rows) {
    const auto part = std::span(sequences).subspan(first, std::min(rows, sequences.size() - first));
    const data::MicroBatch batch = padded_batch(part);
    const std::vector<float> all = impl_->loaded->all_logits(batch);
    for (size_t row = 0; row < part.size(); ++row) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row) * batch.sequence_length * vocabulary;
      results.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(part[row].size()) * vocabulary);
    }
  }
  return results;
}

Generated Model::generate(const std::string& prompt, const GenerateOptions& options) {
  train::GenerateOptions request;
  request.prompt = prompt;
  request.chat = options.chat;
  request.system = options.system;
  return run_generation(*impl_->loaded, std::move(request), options);
}

Generated Model::generate(std::span<const int32_t> prompt, const GenerateOptions& options) {
  if (prompt.empty()) fail(ErrorCode::usage, "the prompt has no tokens");
  if (options.chat) fail(ErrorCode::usage, "a chat template is applied to text, and the prompt is token ids");
  train::GenerateOptions request;
  request.prompt_ids.assign(prompt.begin(), prompt.end());
  return run_generation(*impl_->loaded, std::move(request), options);
}

std::vector<Generated> Model::generate_batch(const std::vector<std::string>& prompts,
                                             const GenerateOptions& options) {
  std::vector<Generated> results;
  for (const std::string& prompt : prompts) results.push_back(generate(prompt, options));
  return results;
}

std::vector<Generated> Model::generate_batch_from_ids(const std::vector<std::vector<int32_t>>& prompts,
                                                      const GenerateOptions& options) {
  std::vector<Generated> results;
  for (const auto& prompt : prompts) results.push_back(generate(prompt, options));
  return results;
}

TextLoss Model::loss(const std::string& text, int64_t stride) {
  if (stride < 0) fail(ErrorCode::usage, "a stride of " + std::to_string(stride) + " tokens is negative");
  train::EvalOptions request;
  request.text = text;
  request.stride = stride;
  const train::EvalResult result = train::evaluate_text(*impl_->loaded, request);
  return {result.loss, result.perplexity, result.bits_per_byte, result.tokens};
}

}  // namespace capstan

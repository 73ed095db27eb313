// Compares every family with the files and results of Transformers (make_families.py): names, shapes, bytes,
// logits, loss and gradients.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "formats/external_model.hpp"
#include "formats/hf_directory.hpp"
#include "formats/rearranged.hpp"
#include "models/registry.hpp"
#include "tests/formats/helpers.hpp"
#include "tests/models/tiny.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/fixture.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;
using namespace capstan::test;
using formats::ExternalModel;

namespace {

const std::string kFamilyFiles = (kFormatFixtures / "families/").string();

constexpr const char* kModels[] = {"gpt2",
                                   "gpt2_bare",
                                   "llama",
                                   "llama_sharded",
                                   "smollm2",
                                   "mistral",
                                   "qwen2",
                                   "qwen3",
                                   "phi3",
                                   "phi3_long",
                                   "olmo2",
                                   "gemma2",
                                   "mixtral",
                                   "qwen2_moe",
                                   "qwen3_moe",
                                   "qwen3_moe_turns",
                                   "olmoe",
                                   "deepseek_v2",
                                   "deepseek_v2_lite",
                                   "deepseek_v2_moe",
                                   "deepseek_v3",
                                   "deepseek_v3_moe",
                                   "gpt_oss",
                                   "gpt_neox",
                                   "gpt_neox_sequential",
                                   "../quantized/gpt_oss_mxfp4"};

// The gradients of a fixture by tensor name.
class Gradients final : public checkpoint::TensorSource {
 public:
  explicit Gradients(const Fixture& fixture) : fixture_(fixture) {
    for (const auto& name : fixture.names("grad."))
      info_[name] = {DType::f32, Shape(std::span<const int64_t>(fixture.shape("grad." + name)))};
  }
  std::string description() const override { return "the fixture"; }
  std::vector<std::string> names() const override { return fixture_.names("grad."); }
  const checkpoint::TensorInfo* find(std::string_view name) const override {
    const auto found = info_.find(std::string(name));
    return found == info_.end() ? nullptr : &found->second;
  }
  void read(std::string_view name, DType, const Region& wanted, std::span<std::byte> out) override {
    const auto values = fixture_.get<float>("grad." + std::string(name));
    copy_region(wanted, full_region(at(name).shape), reinterpret_cast<const std::byte*>(values.data()),
                DType::f32, wanted, out.data(), DType::f32);
  }

 private:
  const Fixture& fixture_;
  std::map<std::string, checkpoint::TensorInfo> info_;
};

double largest(const std::vector<float>& values) {
  double result = 0;
  for (const float v : values) result = std::max(result, std::abs(static_cast<double>(v)));
  return result;
}
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double result = 0;
  for (size_t i = 0; i < a.size(); ++i) result = std::max(result, std::abs(static_cast<double>(a[i]) - b[i]));
  return result;
}

}  // namespace

TEST_CASE("every family's parameters are those that the engine asks for") {
  for (const std::string name : kModels) {
    CAPTURE(name);
    const auto external = ExternalModel::open("hf:" + kFamilyFiles + name);
    const auto source = external->parameters(external->model());
    CHECK(source->find("embedding.word_embeddings.weight")->shape[0] == external->model().padded_vocab_size);
    const auto model = models::build(external->model());
    std::set<std::string> names;
    for (const auto& parameter : model->parameters()) {
      CAPTURE(parameter->name());
      names.insert(parameter->name());
      const auto* info = source->find(parameter->name());
      REQUIRE(info);
      REQUIRE(info->shape.size() == static_cast<size_t>(parameter->spec().shape.rank()));
      for (size_t d = 0; d < info->shape.size(); ++d)
        CHECK(info->shape[d] == parameter->spec().shape[static_cast<int>(d)]);
    }
    const auto given = source->names();
    CHECK(names == std::set<std::string>(given.begin(), given.end()));
  }
}

TEST_CASE("any region of a parameter equals that part of the full parameter") {
  for (const std::string name : kModels) {
    const auto external = ExternalModel::open("hf:" + kFamilyFiles + name);
    const auto source = external->parameters(external->model());
    uint64_t state = 17;
    const auto below = [&](int64_t end) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(end));
    };
    for (const auto& tensor : source->names()) {
      CAPTURE(tensor);
      const auto& shape = source->at(tensor).shape;
      const auto complete = floats(*source, tensor);
      for (int round = 0; round < 4; ++round) {
        Region part;
        for (const int64_t size : shape) {
          part.offsets.push_back(below(size));
          part.sizes.push_back(1 + below(size - part.offsets.back()));
        }
        const auto cells = static_cast<size_t>(part.sizes.elements());
        std::vector<float> got(cells), wanted(cells);
        source->read(tensor, DType::f32, part, std::as_writable_bytes(std::span(got)));
        copy_region(part, full_region(shape), reinterpret_cast<const std::byte*>(complete.data()), DType::f32,
                    part, reinterpret_cast<std::byte*>(wanted.data()), DType::f32);
        REQUIRE(got == wanted);
      }
    }
  }
}

TEST_CASE("logits, loss and gradients are Transformers'") {
  const auto device = Cpu::make(1);
  for (const std::string name : kModels) {
    CAPTURE(name);
    const auto external = ExternalModel::open("hf:" + kFamilyFiles + name);
    config::ModelConfig config = external->model();
    config.hidden_dropout = config.attention_dropout = 0;
    // Transformers adds its loss on demand only, over all layers at once.
    config.moe_aux_loss_coeff = 0;
    const auto source = external->parameters(config);
    const auto model = models::build(config);
    SimpleStore store(*device, model->parameters(), DType::f32);
    for (const auto& parameter : model->parameters())
      store.set(*parameter, floats(*source, parameter->name()));

    const Fixture expected(kFamilyFiles + name + "/expected.safetensors");
    const auto text = expected.get<int32_t>("tokens");
    const int64_t batch = expected.shape("tokens")[0], length = expected.shape("tokens")[1] - 1;
    std::vector<int32_t> tokens, labels;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t s = 0; s < length; ++s) {
        tokens.push_back(text[static_cast<size_t>(b * (length + 1) + s)]);
        labels.push_back(text[static_cast<size_t>(b * (length + 1) + s + 1)]);
      }
    const auto count = static_cast<double>(tokens.size());
    const models::Batch input =
        make_batch(*device, batch, length, tokens, labels, std::vector<float>(tokens.size(), 1.0f));
    StepContext context{*device, store};
    {
      Tape tape(context, Tape::Mode::inference);
      const auto truth = expected.get<float>("logits");
      const double off = difference(model->all_logits(tape, input).to_floats(), truth) / largest(truth);
      MESSAGE(name << ": logits " << off);
      CHECK(off < 1e-5);
    }
    Tape tape(context);
    const models::Loss loss = model->forward(tape, input, {});
    CHECK(std::abs(loss.exact_sum.to_host<double>()[0] / count / expected.get<float>("loss")[0] - 1) < 1e-5);
    tape.backward({{"loss", Tensor::from_host<float>(*device, {1}, std::vector<float>{1})}});

    Gradients theirs(expected);
    const auto gradients = external->arranged(theirs, config);
    for (const auto& parameter : model->parameters()) {
      CAPTURE(parameter->name());
      auto gradient = store.gradient(*parameter).to_floats();
      for (float& g : gradient) g = static_cast<float>(g / count);
      const auto truth = floats(*gradients, parameter->name());
      // Its padding token, 0, has no gradient in PyTorch's embedding.
      if (name == "phi3_long" && parameter->name() == "embedding.word_embeddings.weight")
        std::fill_n(gradient.begin(), config.hidden_size, 0.0f);
      // A key bias adds the same to all scores of a query: its gradient is rounding noise around zero.
      const double scale = std::max(largest(truth), 1e-3);
      CHECK(difference(gradient, truth) < 1e-5 * scale);
    }
  }
}

// Adapters with the program alone: trained on a checkpoint as base model, saved without it, continued,
// evaluated and merged.
#include <doctest/doctest.h>

#include <filesystem>

#include "base/json.hpp"
#include "base/text.hpp"
#include "process.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

struct Base {
  ScratchDirectory scratch;
  Base() {
    scratch.write(
        "text.txt",
        "the captain turns the capstan, and the capstan hauls the rope. nobody forgets the rope.\n");
    const Finished trained = train({"train.train_iters=6", "--run-dir", "base"});
    REQUIRE_MESSAGE(trained.code == 0, trained.err);
  }
  Finished in(std::vector<std::string> arguments) const {
    Launch launch;
    launch.directory = scratch.path();
    launch.arguments = std::move(arguments);
    return run(launch);
  }
  Finished train(std::vector<std::string> more) const {
    more.insert(more.begin(),
                {"tokenizer=byte", "model.vocab_size=257", "optimizer.lr=1e-2", "optimizer.min_lr=0"});
    return in(train_tiny(more));
  }
  Finished adapt(const std::string& preset, std::vector<std::string> more) const {
    more.insert(more.begin(), {"peft=" + preset, "peft.dim=3", "peft.dropout=0.1",
                               "checkpoint.pretrained_checkpoint=base"});
    return train(more);
  }
  double loss(const std::string& name, const std::string& adapter = "") const {
    std::vector<std::string> arguments = {"eval", name, "--text", "text.txt", "--json"};
    if (!adapter.empty()) arguments.insert(arguments.end(), {"--adapter", adapter});
    const Finished result = in(arguments);
    REQUIRE_MESSAGE(result.code == 0, result.err);
    return capstan::json_of(result.out)["loss"].get<double>();
  }
  json manifest(const std::string& name, const std::string& step) const {
    return capstan::json_of(read_text(scratch.file(name + "/checkpoints/step-" + step + "/manifest.json")));
  }
};
const Base& base() {
  static const Base made;
  return made;
}

// "(2.1K trainable, 4.2%; 49.1K frozen)": counted in the files.
std::string header_of(const json& adapters, const json& weights) {
  const auto count = [](const json& tensors) {
    double all = 0;
    for (const auto& [name, tensor] : tensors.items()) {
      if (name.starts_with("optimizer.")) continue;
      double elements = 1;
      for (const json& size : tensor["shape"]) elements *= size.get<double>();
      all += elements;
    }
    return all;
  };
  const double trainable = count(adapters), frozen = count(weights);
  char share[32];
  std::snprintf(share, sizeof share, "%.3g", 100 * trainable / (trainable + frozen));
  return "(" + capstan::human_count(trainable) + " trainable, " + share + "%; " +
         capstan::human_count(frozen) + " frozen)";
}

}  // namespace

TEST_CASE("adapters of every kind train, are saved without their base, and merge into what they compute" *
          doctest::test_suite("one_process")) {
  const Base& b = base();
  const double before = b.loss("base");
  for (const std::string preset :
       {"lora", "rslora", "lora_plus", "canonical_lora", "dora", "canonical_dora", "qlora"}) {
    CAPTURE(preset);
    std::vector<std::string> words{"train.train_iters=4", "--run-dir", preset};
    // Bytes have no token for the end of its turns.
    const bool chat = preset == "lora";
    if (chat) words.push_back("tokenizer.chat_template=chatml");
    const Finished trained = b.adapt(preset, words);
    REQUIRE_MESSAGE(trained.code == 0, trained.err);
    const json tensors = b.manifest(preset, "00000004")["tensors"];
    CHECK(tensors.size() > 0);
    CHECK_MESSAGE(contains(trained.err, header_of(tensors, b.manifest("base", "00000006")["tensors"])),
                  trained.err);
    for (const auto& [name, tensor] : tensors.items()) CHECK_MESSAGE(contains(name, ".adapter."), name);
    const double adapted = b.loss(preset);
    CHECK(adapted != before);
    CHECK(b.loss("base", preset) == adapted);
    const Finished merged = b.in({"merge", preset, preset + "-merged"});
    REQUIRE_MESSAGE(merged.code == 0, merged.err);
    const std::string warning = "warning: chat template chatml ends an answer with `<|im_end|>`, which";
    CHECK(contains(merged.err, warning) == chat);
    CHECK(b.loss(preset + "-merged") == doctest::Approx(adapted).epsilon(1e-6));
    CHECK(b.in({"merge", preset, preset + "-merged"}).code != 0);  // it is there already
  }
  const Finished converted = b.in({"convert", "lora", "peft:lora-peft"});
  CHECK_MESSAGE(contains(converted.err, "warning: chat template chatml ends an answer with"), converted.err);
  // With the tokenizer and the template that the adapters were trained with, as the full model has them.
  REQUIRE(b.in({"convert", "lora-merged", "hf:lora-hf"}).code == 0);
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    const std::string beside = read_text(b.scratch.file(std::string("lora-peft/") + file));
    CHECK_MESSAGE(!beside.empty(), file);
    CHECK_MESSAGE(beside == read_text(b.scratch.file(std::string("lora-hf/") + file)), file);
  }
  // Four bits are felt, but little.
  const double exact = b.loss("lora"), quantized = b.loss("qlora");
  CHECK(exact != quantized);
  CHECK(quantized == doctest::Approx(exact).epsilon(0.03));
}

TEST_CASE("adapters of experts: counted, trained on several ranks, saved, merged, and in PEFT's files") {
  const Base& b = base();
  // Mixtral's kind.
  std::vector<std::string> sparse = {"model.num_layers=2", "model.num_moe_experts=4",
                                     "model.moe_router_topk=2", "model.moe_ffn_hidden_size=64",
                                     "model.moe_aux_loss_coeff=0.01"};
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), sparse.begin(), sparse.end());
    const Finished trained = b.train(std::move(more));
    REQUIRE_MESSAGE(trained.code == 0, trained.err);
    return trained;
  };
  train({"train.train_iters=6", "--run-dir", "sparse"});
  const double before = b.loss("sparse");
  for (const std::string preset : {"lora", "canonical_lora"}) {
    CAPTURE(preset);
    const std::string run = "sparse-" + preset;
    const std::vector<std::string> tune = {"peft=" + preset, "peft.dim=3", "peft.dropout=0.1",
                                           "checkpoint.pretrained_checkpoint=sparse", "train.train_iters=4"};
    std::vector<std::string> words = tune;
    words.insert(words.end(), {"--run-dir", run});
    const Finished trained = train(words);
    const json tensors = b.manifest(run, "00000004")["tensors"];
    CHECK_MESSAGE(contains(trained.err, header_of(tensors, b.manifest("sparse", "00000006")["tensors"])),
                  trained.err);
    const std::string second = "decoder.layers.1.mlp.experts.linear_fc2.adapter.linear_in.weight";
    REQUIRE(tensors.contains(second));
    CHECK(tensors[second]["shape"] == json::array({4, 3, 64}));
    const double adapted = b.loss(run);
    CHECK(adapted != before);
    CHECK(b.loss("sparse", run) == adapted);
    const Finished merged = b.in({"merge", run, run + "-merged"});
    REQUIRE_MESSAGE(merged.code == 0, merged.err);
    CHECK(b.loss(run + "-merged") == doctest::Approx(adapted).epsilon(1e-6));
    const Finished exported = b.in({"convert", run + "-merged", "hf:" + run + "-hf"});
    CHECK_MESSAGE(exported.code == 0, exported.err);
    const Finished of_hf =
        b.in({"eval", "hf:" + run + "-hf", "--text", "text.txt", "--json", "model.seq_length=16"});
    REQUIRE_MESSAGE(of_hf.code == 0, of_hf.err);
    CHECK(capstan::json_of(of_hf.out)["loss"].get<double>() == doctest::Approx(adapted).epsilon(1e-6));
    // PEFT's files, there and back.
    const Finished written = b.in({"convert", run, "peft:" + run + "-peft"});
    REQUIRE_MESSAGE(written.code == 0, written.err);
    CHECK(b.loss("sparse", run + "-peft") == doctest::Approx(adapted).epsilon(1e-6));
    const Finished read = b.in({"convert", "peft:" + run + "-peft", run + "-back", "--base", "sparse"});
    REQUIRE_MESSAGE(read.code == 0, read.err);
    REQUIRE(b.in({"convert", run + "-back", "peft:" + run + "-again"}).code == 0);
    CHECK(read_text(b.scratch.file(run + "-peft/adapter_model.safetensors")) ==
          read_text(b.scratch.file(run + "-again/adapter_model.safetensors")));
    // Two ranks with two experts each, and the rest of the steps on one.
    words = tune;
    words.insert(words.end(),
                 {"--run-dir", run + "-two", "--nproc", "2", "dist.ep=2", "train.exit_interval=2"});
    words.insert(words.begin(), sparse.begin(), sparse.end());
    CHECK(b.train(words).code == 75);
    words = tune;
    words.insert(words.end(), {"--run-dir", run + "-two", "--resume"});
    train(words);
    CHECK(b.loss(run + "-two") == doctest::Approx(adapted).epsilon(1e-4));
  }
  // Experts with biases, which are matrices as the weights of other layers are.
  train({"model.add_mlp_bias=true", "train.train_iters=2", "--run-dir", "biased"});
  train({"model.add_mlp_bias=true", "peft=lora", "peft.dim=3", "checkpoint.pretrained_checkpoint=biased",
         "train.train_iters=2", "--run-dir", "biased-lora"});
  const Finished biased = b.in({"merge", "biased-lora", "biased-merged"});
  REQUIRE_MESSAGE(biased.code == 0, biased.err);
  CHECK(b.loss("biased-merged") == doctest::Approx(b.loss("biased-lora")).epsilon(1e-6));
  std::vector<std::string> words = sparse;
  words.insert(words.end(), {"peft=dora", "checkpoint.pretrained_checkpoint=sparse", "--run-dir", "x"});
  const Finished refused = b.train(words);
  CHECK(refused.code == 2);
  CHECK_MESSAGE(contains(refused.err, "experts have no adapters with magnitudes"), refused.err);
}

TEST_CASE("a run with adapters that stops goes on as if it had not" * doctest::test_suite("one_process")) {
  const Base& b = base();
  for (const std::string preset : {"dora", "qlora"}) {
    CAPTURE(preset);
    const std::string uninterrupted = "uninterrupted-" + preset, parts = "parts-" + preset;
    REQUIRE(b.adapt(preset, {"train.train_iters=5", "--run-dir", uninterrupted}).code == 0);
    const Finished stopped =
        b.adapt(preset, {"train.train_iters=5", "--run-dir", parts, "train.exit_interval=2"});
    CHECK_MESSAGE(stopped.code == 75, stopped.err);
    const Finished resumed = b.adapt(preset, {"train.train_iters=5", "--run-dir", parts, "--resume"});
    CHECK_MESSAGE(resumed.code == 0, resumed.err);
    const Finished difference =
        b.in({"diff", uninterrupted + "/checkpoints/step-00000005", parts + "/checkpoints/step-00000005"});
    CHECK_MESSAGE(difference.code == 0, difference.out);
  }
}

TEST_CASE("the base is known by its hash; adapters without one, or without a layer, are refused" *
          doctest::test_suite("one_process")) {
  const Base& b = base();
  REQUIRE(b.adapt("lora", {"train.train_iters=2", "--run-dir", "own"}).code == 0);
  REQUIRE(b.train({"train.train_iters=7", "--run-dir", "other"}).code == 0);
  const Finished wrong =
      b.in({"eval", "own", "--text", "text.txt", "checkpoint.pretrained_checkpoint=other"});
  CHECK(wrong.code != 0);
  CHECK_MESSAGE(contains(wrong.err, "is not the base model of these adapters"), wrong.err);
  fs::copy(b.scratch.file("base"), b.scratch.file("moved"), fs::copy_options::recursive);
  const Finished moved =
      b.in({"eval", "own", "--text", "text.txt", "checkpoint.pretrained_checkpoint=moved"});
  CHECK_MESSAGE(moved.code == 0, moved.err);

  CHECK_MESSAGE(contains(b.in({"merge", "base", "x"}).err, "full model, not adapters"), "");
  const Finished described = b.in(
      {"eval", "base", "--text", "text.txt", "peft=lora", "checkpoint.pretrained_checkpoint=base", "--json"});
  CHECK(described.code == 2);
  CHECK_MESSAGE(contains(described.err, "full model, which has no adapters"), described.err);
  const Finished misspelled = b.adapt("lora", {"peft.target_modules=[linear_qvk]", "--run-dir", "x"});
  CHECK(misspelled.code == 2);
  CHECK_MESSAGE(contains(misspelled.err, "did you mean `linear_qkv`?"), misspelled.err);
  CHECK(b.adapt("lora",
                {"peft.exclude_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]", "--run-dir", "x"})
            .code == 2);
  CHECK(b.train({"peft=lora", "--run-dir", "x"}).code == 2);
}

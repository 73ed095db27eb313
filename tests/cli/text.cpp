// Texts and chats with a model: what stands before them and where they end, against Transformers
// (tests/golden/make_text_fixtures.py).
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "base/json.hpp"
#include "process.hpp"
#include "support/paths.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string kTests = std::string(capstan::test::kSourceDirectory) + "/tests/";
const std::string kSmol = kTests + "formats/families/smollm2";

json expected() {
  return capstan::json_of(read_text(kTests + "cli/text/expected.json"));
}

// The model with the tokenizer that begins every text with a token.
std::string model_with_front(const ScratchDirectory& home) {
  const std::string path = home.file("model");
  fs::copy(kSmol, path);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    fs::copy_file(kTests + "cli/text/" + name, path + "/" + name, fs::copy_options::overwrite_existing);
  return path;
}

void edit(const std::string& file, const std::string& key, const json& value) {
  json content = capstan::json_of(read_text(file));
  content[key] = value;
  std::ofstream(file) << content;
}

Finished generate(const std::string& model, std::vector<std::string> more) {
  std::vector<std::string> words = {"generate",       model, "--prompt",      expected()["prompt"],
                                    "--max-tokens",   "8",   "--temperature", "0",
                                    "train.threads=1"};
  words.insert(words.end(), more.begin(), more.end());
  return run(words);
}
json generated(const std::string& model, std::vector<std::string> more = {}) {
  more.push_back("--json");
  const Finished done = generate(model, more);
  REQUIRE_MESSAGE(done.code == 0, done.err);
  return capstan::json_of(done.out);
}
void check_same(const json& got, const json& truth) {
  CHECK(got["text"] == truth["text"]);
  CHECK(got["prompt_tokens"] == truth["prompt_tokens"]);
  CHECK(got["tokens"] == truth["ids"].size());
  CHECK(got["ended"] == false);
}

}  // namespace

TEST_CASE("a text begins with what its tokenizer puts before it, once") {
  const ScratchDirectory home;
  const json truth = expected();
  const std::string model = model_with_front(home), text = home.write("text.txt", truth["text"]);
  REQUIRE(run({"convert", "hf:" + model, home.file("ours")}).code == 0);
  for (const std::string& name : {"hf:" + model, home.file("ours")}) {
    CAPTURE(name);
    const auto eval = [&](std::vector<std::string> more) {
      std::vector<std::string> words = {
          "eval", name, "--text", text, "--json", "model.seq_length=24", "train.threads=1"};
      words.insert(words.end(), more.begin(), more.end());
      const Finished done = run(words);
      REQUIRE_MESSAGE(done.code == 0, done.err);
      return capstan::json_of(done.out);
    };
    const json with = eval({}), without = eval({"--no-bos"});
    CHECK(with["loss"].get<double>() == doctest::Approx(truth["loss"].get<double>()).epsilon(1e-5));
    CHECK(with["tokens"] == truth["tokens"]);
    CHECK(without["loss"].get<double>() ==
          doctest::Approx(truth["loss_without"].get<double>()).epsilon(1e-5));
    check_same(generated(name), truth["greedy"]);
    check_same(generated(name, {"--no-bos"}), truth["greedy_without"]);
    // The template says itself what a chat begins with.
    check_same(generated(name, {"--chat"}), truth["chat"]);
    check_same(generated(name, {"--chat", "--system", "be thin"}), truth["chat_system"]);
  }
  // A checkpoint has a tokenizer of its own: another one is refused, not ignored.
  for (const std::string& other : {home.file("none.json"), model + "/tokenizer.json"}) {
    const std::string change = "tokenizer.tokenizer_model=" + other;
    for (const Finished& done : {run({"eval", home.file("ours"), "--text", text, change}),
                                 run({"generate", home.file("ours"), "--prompt", "x", change})}) {
      CHECK(done.code != 0);
      CHECK_MESSAGE(contains(done.err, "holds the tokenizer that it was trained with"), done.err);
    }
  }
  // So is one that differs from a Hugging Face model's own; the same under another name is none.
  json changed = capstan::json_of(read_text(model + "/tokenizer.json"));
  changed["model"]["merges"].erase(changed["model"]["merges"].size() - 1);
  std::ofstream(home.file("other.json")) << changed;
  const Finished other =
      run({"eval", "hf:" + model, "--text", text, "tokenizer.tokenizer_model=" + home.file("other.json")});
  CHECK(other.code == 2);
  CHECK_MESSAGE(contains(other.err, "has a tokenizer of its own, and "), other.err);
  fs::copy_file(model + "/tokenizer.json", home.file("same.json"));
  CHECK(run({"eval", "hf:" + model, "--text", text, "tokenizer.tokenizer_model=" + home.file("same.json"),
             "train.threads=1"})
            .code == 0);
}

TEST_CASE("a text ends at every token that the tokenizer or the model's settings end it with") {
  const ScratchDirectory home;
  const std::string model = model_with_front(home);
  // The token that is generated again and again.
  const int64_t end = expected()["greedy_without"]["ids"][0];
  const auto ends = [&](const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"--no-bos"};
    words.insert(words.end(), more.begin(), more.end());
    const json got = generated("hf:" + model, words);
    CHECK(got["tokens"] == (got["ended"] == true ? 1 : 8));
    if (got["ended"] == true) CHECK(got["text"] == "");
    return got["ended"] == true;
  };
  const std::string settings = model + "/generation_config.json";
  CHECK_FALSE(ends());
  edit(settings, "eos_token_id", end);
  CHECK(ends());
  CHECK_FALSE(ends({"--ignore-eod"}));
  edit(settings, "eos_token_id", {7, end});
  CHECK(ends());
  // The same in a checkpoint.
  REQUIRE(run({"convert", "hf:" + model, home.file("ours")}).code == 0);
  CHECK(generated(home.file("ours"), {"--no-bos"})["ended"] == true);
  edit(settings, "eos_token_id", "in");
  const Finished wrong = generate("hf:" + model, {});
  CHECK(wrong.code == 2);
  CHECK_MESSAGE(contains(wrong.err, "generation_config.json: `eos_token_id` is neither an id nor a list"),
                wrong.err);
  edit(settings, "eos_token_id", nullptr);
  CHECK_FALSE(ends());
  // Without generation settings config.json says it.
  fs::remove(settings);
  CHECK_FALSE(ends());
  edit(model + "/config.json", "eos_token_id", end);
  CHECK(ends());
  edit(model + "/config.json", "eos_token_id", 2);
  edit(model + "/tokenizer_config.json", "eos_token", "in");
  CHECK(ends());
}

TEST_CASE(
    "a chat goes by the recipe's template or the tokenizer's own, and ends as the template ends an answer") {
  const ScratchDirectory home;
  const json truth = expected();
  const std::string model = model_with_front(home), name = "hf:" + model;
  const Finished plain = generate(name, {"--chat"});
  CHECK(plain.out == truth["chat"]["text"].get<std::string>() + "\n");  // without what was asked
  const auto with = [&](const std::string& file, const std::string& text) {
    return "tokenizer.chat_template=" + home.write(file, text);
  };
  // The model repeats "in". Here the chat template ends an answer with that text, once as a token and once as
  // part of a text.
  const std::string same =
      "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content + '";
  const json one = generated(name, {"--chat", with("one.jinja", same + "in' }}{% endif %}{% endfor %}")});
  CHECK(one["ended"] == true);
  CHECK(one["tokens"] == 1);
  const json three =
      generated(name, {"--chat", with("three.jinja", same + "ninin' }}{% endif %}{% endfor %}")});
  CHECK(three["ended"] == true);
  CHECK(three["tokens"] == 3);
  CHECK(three["text"] == "i");
  CHECK(generated(name, {"--chat", "tokenizer.chat_template=chatml"})["prompt_tokens"] ==
        truth["chat"]["prompt_tokens"]);

  const auto refused = [&](std::vector<std::string> more, const std::string& why) {
    const Finished done = generate(name, std::move(more));
    CHECK(done.code == 2);
    CHECK_MESSAGE(contains(done.err, why), done.err);
  };
  refused({"--system", "x"}, "`--system` applies to chats");
  refused({"--chat", "--no-bos"}, "`--no-bos` does not apply to chats");
  refused({"--chat", "--system", "x", "tokenizer.chat_template=gemma"}, "System role not supported");
  refused({"--chat", "tokenizer.chat_template=nowhere/chatml"}, "not found: chat template = ");
  fs::remove(model + "/chat_template.jinja");
  refused({"--chat"}, "the model comes without one");
}

TEST_CASE("the tokenizer of a GGUF file has its special tokens and its chat template, and stays with a run") {
  const ScratchDirectory home;
  const std::string gguf = "gguf:" + kTests + "formats/gguf/smollm2.gguf";
  check_same(generated(gguf, {"--chat"}), expected()["chat"]);
  const std::string recipe =
      home.write("tune.yaml",
                 "model: {preset: \"" + gguf +
                     "\", seq_length: 40}\nmixed_precision: fp32\n"
                     "dataset: {preset: sft, train_files: [chats.jsonl]}\nvalidation: {eval_interval: null}\n"
                     "tokenizer: {preset: huggingface, tokenizer_model: \"" +
                     gguf +
                     "\"}\ntrain: {micro_batch_size: 1, global_batch_size: 2, train_iters: 1, threads: 1}\n"
                     "optimizer: {preset: adamw, lr: 1e-9}\ncheckpoint: {pretrained_checkpoint: \"" +
                     gguf + "\"}\n");
  std::string lines;
  for (const char* const word : {"a", "b", "c"})
    lines += R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ")" +
             std::string(word) + "\"}]}\n";
  home.write("chats.jsonl", lines);
  const Finished trained = run({"train", recipe, "--run-dir", home.file("tuned")});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  const std::string step = home.file("tuned/checkpoints/step-00000001/");
  CHECK(fs::exists(step + "tokenizer.json"));
  const json config = capstan::json_of(read_text(step + "tokenizer_config.json"));
  CHECK(config["eos_token"] == "<|im_end|>");
  CHECK(config["chat_template"] == read_text(kSmol + "/chat_template.jinja"));
  check_same(generated(home.file("tuned"), {"--chat"}), expected()["chat"]);
}

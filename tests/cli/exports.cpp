// A model that was trained from nothing, in the files of other programs: what ends its texts goes along,
// there and back.
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

const std::string kFamilies = std::string(capstan::test::kSourceDirectory) + "/tests/formats/families/";

const char* const kRecipe = R"(
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, num_query_groups: 1, seq_length: 32,
  vocab_size: 300, position_embedding_type: rope, normalization: RMSNorm, activation_func: silu, gated_linear_unit: true,
  add_bias_linear: false, share_embeddings_and_output_weights: false, hidden_dropout: 0.0, attention_dropout: 0.0}
mixed_precision: fp32
train: {micro_batch_size: 4, global_batch_size: 4, train_iters: 40, threads: 1}
optimizer: {preset: adamw, lr: 3e-2}
dataset: {preset: gpt, data_path: corpus_text_document, split: "100,0,0"}
validation: {eval_interval: null}
tokenizer: {preset: huggingface, tokenizer_model: tokenizer.json, eod_token: "<|doc|>", chat_template: chatml}
)";

struct Home : ScratchDirectory {
  Finished in(std::vector<std::string> arguments) const {
    Launch launch;
    launch.directory = path();
    launch.arguments = std::move(arguments);
    return run(launch);
  }
  Finished good(std::vector<std::string> arguments) const {
    Finished done = in(std::move(arguments));
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return done;
  }
  void refused(std::vector<std::string> arguments, const std::vector<std::string>& why) const {
    const Finished done = in(std::move(arguments));
    CHECK(done.code != 0);
    CHECK(done.code != 70);
    CHECK(done.out.empty());
    for (const std::string& part : why)
      CHECK_MESSAGE(contains(done.err, part), part << " not in " << done.err);
  }
  json read(const std::string& name) const { return capstan::json_of(read_text(file(name))); }
};

// A model that has learned that documents are "ab cd ef".
struct Trained : Home {
  Trained() {
    std::string text;
    for (int i = 0; i < 200; ++i) text += "ab cd ef\n%\n";
    write("corpus.txt", text);
    write("tiny.yaml", kRecipe);
    good({"tokenizer", "train", "corpus.txt", "--separator", "%", "--vocab-size", "300", "--special",
          "<|doc|>,<|im_start|>,<|im_end|>", "--output", "tokenizer.json"});
    good({"data", "prepare", "corpus.txt", "--separator", "%", "--tokenizer", "tokenizer.json",
          "--append-eod", "--eod", "<|doc|>", "--output", "corpus"});
    good({"train", "tiny.yaml", "--run-dir", "run"});
  }
};

}  // namespace

TEST_CASE(
    "a run from nothing is exported with what begins, ends and pads its texts, and with its chat template") {
  const Trained home;
  CHECK_FALSE(contains(home.good({"convert", "run", "hf:hf"}).err, "warning"));
  const int end = 0, answer_end = 2;
  const json config = home.read("hf/config.json"), generation = home.read("hf/generation_config.json"),
             tokenizer = home.read("hf/tokenizer_config.json");
  CHECK(generation ==
        json{{"bos_token_id", end}, {"eos_token_id", {end, answer_end}}, {"pad_token_id", end}});
  CHECK(config["bos_token_id"] == end);
  CHECK(config["eos_token_id"] == json{end, answer_end});
  CHECK(config["pad_token_id"].is_null());  // Transformers would not learn that row of the embedding
  CHECK(tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast");
  CHECK(tokenizer["eos_token"] == "<|doc|>");
  CHECK(tokenizer["bos_token"] == "<|doc|>");
  CHECK_FALSE(tokenizer.contains("pad_token"));  // the tokenizer has none
  CHECK(tokenizer["model_max_length"] == 32);
  CHECK(read_text(home.file("hf/tokenizer.json")) == read_text(home.file("tokenizer.json")));
  CHECK(contains(read_text(home.file("hf/chat_template.jinja")), "<|im_start|>"));

  // GGUF keeps all of it: through a checkpoint and at once.
  home.good({"convert", "run", "gguf:m.gguf", "--type", "f32"});
  home.good({"convert", "gguf:m.gguf", "hf:again"});
  home.good({"convert", "gguf:m.gguf", "ours"});
  home.good({"convert", "ours", "hf:back"});
  for (const std::string name : {"again", "back"}) {
    CHECK(home.read(name + "/generation_config.json") == generation);
    const json there = home.read(name + "/config.json"), words = home.read(name + "/tokenizer_config.json");
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) CHECK(there[key] == config[key]);
    for (const char* key :
         {"bos_token", "eos_token", "tokenizer_class", "model_max_length", "clean_up_tokenization_spaces"})
      CHECK(words[key] == tokenizer[key]);
    // llama.cpp's Jinja knows no {% generation %}; Transformers does.
    const std::string in_gguf = words["chat_template"],
                      in_hf = read_text(home.file("hf/chat_template.jinja"));
    CHECK(contains(in_hf, "{% generation %}"));
    CHECK_FALSE(contains(in_gguf, "{% generation %}"));
    CHECK(in_gguf.size() + std::string("{% endgeneration %}").size() - std::string("{% endif %}").size() +
              std::string("{% generation %}").size() - std::string("{% if true %}").size() ==
          in_hf.size());
  }
  // Generation stops after the document.
  for (const std::string model : {"run", "hf:hf", "gguf:m.gguf", "ours", "hf:back"}) {
    CAPTURE(model);
    const json said = capstan::json_of(home.good({"generate", model, "--prompt", "ab", "--temperature", "0",
                                                  "--json", "--max-tokens", "8", "train.threads=1"})
                                           .out);
    CHECK(said["ended"] == true);
    CHECK(said["text"] == " cd ef");
    CHECK(said["context_full"] == false);
  }
  // A tokenizer that lies in no file, and a model without one.
  home.good(
      {"train", "tiny.yaml", "dataset=mock", "tokenizer=byte", "train.train_iters=1", "--run-dir", "bytes"});
  // Its template ends a turn with a text for which the bytes have no token.
  CHECK(
      contains(home.good({"convert", "bytes", "hf:bytes-hf"}).err,
               "warning: chat template chatml ends an answer with `<|im_end|>`, which the tokenizer does not "
               "encode as one token: other programs"));
  CHECK(home.read("bytes-hf/generation_config.json")["eos_token_id"] == 256);
  CHECK(home.read("bytes-hf/tokenizer_config.json")["eos_token"] == "<|endoftext|>");
  CHECK(fs::exists(home.file("bytes-hf/tokenizer.json")));
  home.good(
      {"train", "tiny.yaml", "dataset=mock", "tokenizer=none", "train.train_iters=1", "--run-dir", "ids"});
  home.good({"convert", "ids", "hf:ids-hf"});
  CHECK_FALSE(fs::exists(home.file("ids-hf/generation_config.json")));
  const Finished without = home.good({"convert", "ids", "gguf:ids.gguf"});
  CHECK_MESSAGE(
      contains(without.err,
               "note: gguf:ids.gguf has no tokenizer, since ids has none: its run trained on mock data"),
      without.err);
  CHECK_FALSE(contains(home.good({"convert", "run", "gguf:n.gguf"}).err, "no tokenizer"));
  // A checkpoint without the files: the recipe names them, while they are the same.
  home.good({"train", "tiny.yaml", "checkpoint.save_tokenizer_assets=false", "train.train_iters=1",
             "--run-dir", "bare"});
  CHECK_FALSE(contains(home.good({"convert", "bare", "hf:bare-hf"}).err, "no tokenizer"));
  CHECK(read_text(home.file("bare-hf/tokenizer.json")) == read_text(home.file("tokenizer.json")));
  CHECK(home.read("bare-hf/generation_config.json") == generation);
  home.good({"tokenizer", "train", "tiny.yaml", "--vocab-size", "290", "--special", "<|doc|>", "--output",
             "tokenizer.json", "--overwrite"});
  CHECK(contains(home.good({"convert", "bare", "hf:bare-without"}).err, "has no tokenizer"));
  // Not the ids of Transformers' own models.
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    CHECK(home.read("ids-hf/config.json").at(key).is_null());
}

TEST_CASE("a run without a tokenizer keeps that of its data, and takes no other later") {
  const Trained home;
  home.good({"train", "tiny.yaml", "tokenizer=none", "train.train_iters=1", "--run-dir", "ids"});
  home.good({"tokenizer", "train", "corpus.txt", "--separator", "%", "--vocab-size", "290", "--special",
             "<|doc|>,<|x|>", "--output", "other.json"});
  const auto eval = [](const std::string& tokenizer) {
    return std::vector<std::string>{"eval",
                                    "ids",
                                    "--text",
                                    "corpus.txt",
                                    "tokenizer.tokenizer_type=huggingface",
                                    "tokenizer.tokenizer_model=" + tokenizer,
                                    "train.threads=1"};
  };
  home.good(eval("tokenizer.json"));
  home.refused(eval("other.json"),
               {"trained with the tokenizer \"tokenizer.json\" (", "not with \"other.json\" ("});
}

TEST_CASE("an ordinary word that ends documents ends texts elsewhere, and stays an ordinary word") {
  const Trained home;
  home.good({"data", "prepare", "corpus.txt", "--separator", "%", "--tokenizer", "tokenizer.json",
             "--append-eod", "--eod", "ab", "--output", "words"});
  const std::vector<std::string> words = {"train", "tiny.yaml", "dataset.data_path=words_text_document",
                                          "train.train_iters=1", "tokenizer.chat_template=null"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    return more;
  };
  // The data says what ends its documents.
  const Finished other = home.good(with({"--run-dir", "other"}));
  CHECK_MESSAGE(contains(other.err + other.out, "tokenizer.eod_token=ab"), other.err);
  home.refused(with({"dataset.eod_mask_loss=true", "--run-dir", "no"}),
               {"end with `ab`", "set tokenizer.eod_token=ab, or set dataset.eod_mask_loss=false"});
  const Finished right = home.good(with({"tokenizer.eod_token=ab", "--run-dir", "word"}));
  CHECK_FALSE(contains(right.err + right.out, "eod_token"));
  home.good({"convert", "word", "hf:word-hf"});
  const json config = home.read("word-hf/tokenizer_config.json");
  CHECK_FALSE(config.contains("eos_token"));
  CHECK_FALSE(config.contains("bos_token"));
  CHECK(home.read("word-hf/generation_config.json")["eos_token_id"].is_number_integer());
}

TEST_CASE("a run on mock data needs no tokenizer, and its model says that it has none") {
  const Home home;
  home.write("tiny.yaml", kRecipe);  // whose tokenizer.json is not there
  const Finished run = home.good({"train", "tiny.yaml", "dataset=mock", "train.train_iters=1",
                                  "tokenizer.chat_template=null", "--run-dir", "mock"});
  CHECK_MESSAGE(!contains(run.out + run.err, "try: capstan generate"), run.err);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"generate", "mock", "--prompt", "ab"},
        {"eval", "mock", "--text", "tiny.yaml"}}) {
    home.refused(words, {"the checkpoint has no tokenizer, since its run trained on mock data",
                         "tokenizer.tokenizer_type=huggingface tokenizer.tokenizer_model=FILE names one"});
  }
  for (const char* to : {"hf:mock-hf", "gguf:mock.gguf"}) {
    const Finished done = home.good({"convert", "mock", to});
    CHECK_MESSAGE(
        contains(done.err, std::string("note: ") + to +
                               " has no tokenizer, since mock has none: its run trained on mock data"),
        done.err);
  }
  CHECK(contains(home.good({"convert", "hf:mock-hf", "gguf:again.gguf"}).err,
                 "note: gguf:again.gguf has no tokenizer, since hf:mock-hf has none\n"));
  CHECK(home.good({"convert", "mock", "gguf:quiet.gguf", "-q"}).err.empty());
  // With a file at hand it can be asked all the same.
  fs::copy_file(kFamilies + "smollm2/tokenizer.json", home.file("other.json"));
  home.good({"generate", "mock", "--prompt", "ab", "--max-tokens", "2",
             "tokenizer.tokenizer_model=other.json", "train.threads=1"});
}

TEST_CASE("a SentencePiece model goes into GGUF, where generation gives the same text") {
  const Home home;
  const std::string families =
      std::string(capstan::test::kSourceDirectory) + "/tests/text/tokenizer/families/";
  fs::copy_file(families + "spm_bpe.model", home.file("spm.model"));
  std::string text;
  for (int i = 0; i < 200; ++i) text += "the cat sat\n%\n";
  home.write("corpus.txt", text);
  home.write("tiny.yaml", kRecipe);
  home.good({"data", "prepare", "corpus.txt", "--separator", "%", "--tokenizer", "spm.model", "--append-eod",
             "--eod", "</s>", "--output", "corpus"});
  const std::vector<std::string> tokenizer = {"tokenizer.tokenizer_type=sentencepiece",
                                              "tokenizer.tokenizer_model=spm.model",
                                              "tokenizer.eod_token=</s>", "model.vocab_size=700"};
  std::vector<std::string> words = {"train", "tiny.yaml", "--run-dir", "run"};
  words.insert(words.end(), tokenizer.begin(), tokenizer.end());
  home.good(words);
  CHECK_FALSE(
      contains(home.good({"convert", "run", "gguf:m.gguf", "--type", "f32"}).err, "has no tokenizer"));
  home.good({"convert", "gguf:m.gguf", "hf:hf"});
  CHECK(fs::exists(home.file("hf/tokenizer.json")));
  std::string said;
  for (const std::string model : {"run", "gguf:m.gguf", "hf:hf"}) {
    CAPTURE(model);
    const json answer = capstan::json_of(home.good({"generate", model, "--prompt", "the cat", "--temperature",
                                                    "0", "--json", "--max-tokens", "8", "train.threads=1"})
                                             .out);
    if (said.empty()) said = answer["text"];
    CHECK(answer["text"] == said);
    CHECK(answer["ended"] == true);
  }
  CHECK(said == " sat");
  // Another kind of SentencePiece's is refused, not left out.
  fs::copy_file(families + "spm_unigram.model", home.file("unigram.model"));
  words = {"train",
           "tiny.yaml",
           "dataset=mock",
           "tokenizer=none",
           "model.vocab_size=700",
           "train.train_iters=1",
           "--run-dir",
           "ids"};
  home.good(words);
  home.good({"convert", "ids", "hf:ids-hf"});
  fs::copy_file(home.file("unigram.model"), home.file("ids-hf/tokenizer.model"));
  home.refused({"convert", "hf:ids-hf", "gguf:u.gguf"},
               {"tokenizer.model: a model of the type Unigram: a GGUF file cannot hold this tokenizer"});
  CHECK_FALSE(fs::exists(home.file("u.gguf")));
  fs::remove(home.file("ids-hf/tokenizer.model"));
  home.write("ids-hf/vocab.txt", "a\nb\n");
  home.refused({"convert", "hf:ids-hf", "gguf:u.gguf"}, {"not `vocab.txt`", "AutoTokenizer"});
}

TEST_CASE(
    "weights that come with another tokenizer: a warning with the first token, an error where the vocabulary "
    "is too small") {
  const Trained home;
  const std::string base = "hf:" + kFamilies + "smollm2";
  home.write("tune.yaml",
             "model: {preset: \"" + base +
                 "\", seq_length: 12}\nmixed_precision: fp32\n"
                 "dataset: {preset: gpt, data_path: corpus_text_document, split: \"100,0,0\"}\n"
                 "validation: {eval_interval: null}\n"
                 "tokenizer: {preset: huggingface, tokenizer_model: tokenizer.json}\n"
                 "train: {micro_batch_size: 1, global_batch_size: 1, train_iters: 1, threads: 1}\n"
                 "optimizer: {preset: adamw, lr: 1e-3}\ncheckpoint: {pretrained_checkpoint: \"" +
                 base + "\"}\n");
  const std::vector<std::string> tune = {"train", "tune.yaml", "--run-dir"};
  auto words = tune;
  words.insert(words.end(), {"other"});
  const Finished warned = home.good(words);
  CHECK_MESSAGE(contains(warned.err, "warning: the weights of "), warned.err);
  CHECK_MESSAGE(contains(warned.err, "come with another tokenizer: "), warned.err);
  CHECK_MESSAGE(contains(warned.err, "ids stand for another token there, the first is 0 ("), warned.err);
  // The model's own, under another name.
  fs::copy_file(kFamilies + "smollm2/tokenizer.json", home.file("own.json"));
  home.good({"data", "prepare", "corpus.txt", "--tokenizer", "own.json", "--output", "own"});
  words = tune;
  words.insert(words.end(),
               {"same", "tokenizer.tokenizer_model=own.json", "dataset.data_path=own_text_document"});
  CHECK_FALSE(contains(home.good(words).err, "another tokenizer"));
  words = tune;
  words.insert(words.end(), {"large", "model.vocab_size=200"});
  home.refused(words, {"the tokenizer has ", "tokens, the model's vocabulary 200", "model.vocab_size="});
}

TEST_CASE("a full context is said, with the field that sets it") {
  const Trained home;
  const auto said = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"generate", "run", "--temperature",  "0", "--ignore-eod",
                                      "--prompt", "ab",  "train.threads=1"};
    words.insert(words.end(), more.begin(), more.end());
    return home.good(words);
  };
  const std::string note = "note: the context is full: prompt and answer have the 32 tokens of model.";
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--chat"}, {"--json"}}) {
    // Outside of the macro, in whose text nothing may be checked.
    const std::string err = said(more).err;
    CHECK_MESSAGE(contains(err, note), err);
  }
  CHECK_FALSE(contains(said({"--max-tokens", "3"}).err, "context"));
  CHECK_FALSE(contains(said({"--quiet"}).err, "context"));
  CHECK(capstan::json_of(said({"--json"}).out)["context_full"] == true);
  home.refused({"generate", "run", "--prompt", std::string(60, 'a')}, {"32 positions (model."});
}

TEST_CASE("merged adapters keep the run's lengths, template and tokenizer") {
  const Home home;
  const std::string base = "hf:" + kFamilies + "smollm2", text = "the thin cat sat in the inn on the hat\n";
  home.write("text.txt", text + text + text);
  home.write("tune.yaml",
             "model: {preset: \"" + base +
                 "\", seq_length: 12}\nmixed_precision: fp32\ndataset: mock\n"
                 "tokenizer: {preset: huggingface, tokenizer_model: \"" +
                 base.substr(3) +
                 "\", chat_template: chatml}\npeft: {preset: lora, dim: 3}\n"
                 "train: {micro_batch_size: 1, global_batch_size: 2, train_iters: 2, threads: 1}\n"
                 "optimizer: {preset: adamw, lr: 1e-2}\ncheckpoint: {pretrained_checkpoint: \"" +
                 base + "\"}\n");
  const auto loss = [&](const std::string& name) {
    return capstan::json_of(
               home.good({"eval", name, "--text", "text.txt", "--json", "train.threads=1"}).out)["loss"]
        .get<double>();
  };
  home.good({"convert", base, "ours"});
  for (const std::string& of : {base, std::string("ours")}) {
    const std::string name = of == "ours" ? "from-ours" : "from-hf";
    home.good({"train", "tune.yaml", "checkpoint.pretrained_checkpoint=" + of, "--run-dir", name});
    home.good({"merge", name, name + "-merged"});
    const double of_run = loss(name);
    CHECK(of_run != doctest::Approx(loss(of)).epsilon(1e-3));
    CHECK(loss(name + "-merged") == doctest::Approx(of_run).epsilon(1e-6));
    home.good({"convert", name + "-merged", "hf:" + name + "-hf"});
    // The template of the run, not of the base; its end is one of the ends.
    CHECK(read_text(home.file(name + "-hf/chat_template.jinja")) !=
          read_text(kFamilies + "smollm2/chat_template.jinja"));
  }
}

TEST_CASE("missing files, and files of another kind, are reported in one way") {
  const Home home;
  fs::copy(kFamilies + "smollm2", home.file("smol"), fs::copy_options::recursive);
  home.write("text.txt", "the thin cat\n");
  home.refused({"eval", "smoll", "--text", "text.txt"},
               {"not found: run or checkpoint = smoll", "did you mean `hf:smol`?"});
  home.refused({"eval", home.file("smoll"), "--text", "text.txt"},
               {"did you mean `hf:" + home.file("smol") + "`?"});  // once
  home.refused({"eval", "hf:smoll", "--text", "text.txt"},
               {"not found: model = hf:", "did you mean `hf:", "smol`?"});
  home.refused({"eval", "hf:smol", "--text", "text.tx"},
               {"not found: text file = text.tx", "did you mean `text.txt`?"});
  home.refused({"eval", "smol", "--text", "text.txt"}, {"`smol` holds no checkpoint", "named hf:smol"});
  home.refused(
      {"eval", "hf:an-org/a-model", "--text", "text.txt"},
      {"not found: model = hf:", "nothing is downloaded", "hf download an-org/a-model --local-dir a-model"});
  home.refused({"convert", "hf:an-org/a-model", "ours"}, {"hf download an-org/a-model"});
  home.refused({"train", "quickstart", "model=hf:an-org/a-model"}, {"hf download an-org/a-model"});
  home.refused(
      {"train", "quickstart", "dataset.data_path=./smol/x", "tokenizer.tokenizer_model=smol/tokenizer.jso"},
      {"not found: dataset.data_path = ./smol/x", "not found: tokenizer.tokenizer_model = smol/tokenizer.jso",
       "did you mean `smol/tokenizer.json`?"});
  home.refused(
      {"train", "quickstart", "dataset=mock", "tokenizer=byte", "checkpoint.pretrained_checkpoint=smol"},
      {"checkpoint.pretrained_checkpoint = smol holds no checkpoint", "named hf:smol"});

  home.refused(
      {"train", "quickstart", "dataset=mock", "tokenizer=byte", "checkpoint.pretrained_checkpoint=smoll"},
      {"not found: checkpoint.pretrained_checkpoint = smoll", "did you mean `hf:smol`?"});

  // Another model's weights: full shapes, the file's first.
  home.refused({"train", "quickstart", "dataset=mock", "tokenizer=none", "model=hf:smol",
                "model.seq_length=12", "mixed_precision=fp32", "train.train_iters=1",
                "model.ffn_hidden_size=24", "checkpoint.pretrained_checkpoint=hf:smol", "--run-dir", "x"},
               {"does not fit the recipe's model", "[270,24] in the checkpoint, [4096,256] in the recipe",
                "[56,24] in the checkpoint, [48,256] in the recipe",
                "begin a recipe: capstan recipe new my.yaml --from hf:", "model=hf:"});
  // The advice: the shipped recipe sets its sizes itself.
  home.good({"recipe", "new", "my.yaml", "--from", "hf:smol"});
  home.good({"train", "my.yaml", "train.train_iters=1", "train.global_batch_size=1", "--run-dir", "runs/my"});
  home.refused({"eval", "my", "--text", "text.txt"},
               {"not found: run or checkpoint = my", "did you mean `runs/my`?"});
  home.refused({"generate", "runs/mi"},
               {"not found: run or checkpoint = runs/mi", "did you mean `runs/my`?"});
  home.refused({"generate", "nosuchrun"}, {"not found: run or checkpoint = nosuchrun",
                                           "name a run directory or a checkpoint; `capstan runs ls`"});
  home.refused({"diff", "runs/my", "runs/myx"},
               {"not found: recipe, run or checkpoint = runs/myx", "did you mean `runs/my`?"});
  home.refused({"diff", "runs/my", "my.yml"},
               {"not found: recipe, run or checkpoint = my.yml", "did you mean `my.yaml`?"});
  home.refused({"eval", "runs/my", "--text", "nosuch.md"},
               {"not found: text file = nosuch.md", "UTF-8 text"});

  const auto tokenizer = [&](const std::string& file, const std::vector<std::string>& why) {
    home.refused({"tokenizer", "encode", "text.txt", "--tokenizer", file}, why);
  };
  tokenizer("text.txt", {"`text.txt` is not a tokenizer"});
  tokenizer("smol/config.json",
            {"`smol/config.json` is not a tokenizer", "did you mean `smol/tokenizer.json`?"});
  const auto replace = [&](const std::string& name, const std::string& content) {
    fs::remove(home.file("smol/" + name));
    std::ofstream(home.file("smol/" + name)) << content;
  };
  replace("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  tokenizer("smol/tokenizer.json", {"is a Git LFS pointer", "git lfs pull"});
  tokenizer("smol", {"is a Git LFS pointer"});
  replace("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  home.refused({"convert", "hf:smol", "ours"}, {"model.safetensors` is a Git LFS pointer"});
  replace("config.json", "<!doctype html>\n<html></html>");
  replace("model.safetensors", "\n<html>");
  home.refused({"convert", "hf:smol", "ours"}, {"is an HTML page", "/resolve/"});
  home.write("m.gguf", "<!DOCTYPE html>");
  home.refused({"convert", "gguf:m.gguf", "ours"}, {"`m.gguf` is an HTML page"});
}

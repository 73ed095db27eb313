// Inputs that a recipe names but that do not exist are found without reading any file contents, with similar
// names. Directories that a run could not write are found too.
#include "train/trainer/inputs.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.hpp"
#include "config/resolve/resolve.hpp"
#include "support/errors.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::train;
using test::error_of, test::holds;

namespace {

struct Files {
  test::TemporaryDirectory directory;
  explicit Files(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const auto path = directory.path() / name;
      std::filesystem::create_directories(path.parent_path());
      write_file_durably(path, "x");
    }
  }
  config::Path path(const std::string& name) const { return {name, (directory.path() / name).string()}; }
  config::Path scheme(const std::string& scheme, const std::string& name) const {
    return {scheme + name, scheme + (directory.path() / name).string()};
  }
};

}  // namespace

TEST_CASE("every file of a recipe is looked for, under its field's name") {
  const Files files{"data/corpus_text_document.bin",
                    "data/corpus_text_document.idx",
                    "tokenizer.json",
                    "model/config.json",
                    "half.idx",
                    "chat.jinja",
                    "lora/adapter_config.json"};
  config::Config c;
  c.dataset.kind = config::DatasetKind::gpt;
  c.dataset.data_path = {{"0.3", "0.3"}, files.path("data/corpus"), {"0.5", "0.5"}, files.path("half"),
                         {"0.2", "0.2"}, files.path("data")};
  c.tokenizer.tokenizer_type = config::TokenizerKind::huggingface;
  c.tokenizer.tokenizer_model = files.path("tokenizer.jsn");
  c.tokenizer.chat_template = config::Path{"chatmll", files.path("chatmll").resolved};
  c.checkpoint.load = files.path("model");
  c.checkpoint.pretrained_checkpoint = files.scheme("hf:", "an-org/a-model");
  c.peft.emplace().adapter = files.path("lor");
  const auto missing = missing_files(c);
  const std::vector<std::array<std::string, 2>> expected = {
      {"checkpoint.load = model is a model of another program, not a run",
       "checkpoint.pretrained_checkpoint=hf:model begins a run with its weights"},
      {"not found: checkpoint.pretrained_checkpoint = hf:an-org/a-model", "hf download an-org/a-model "},
      {"not found: peft.adapter = lor", "did you mean `lora`?"},
      {"not found: tokenizer.tokenizer_model = tokenizer.jsn", "did you mean `tokenizer.json`?"},
      {"not found: tokenizer.chat_template = chatmll", "did you mean `chatml`"},
      {"not found: dataset.data_path = data/corpus", "did you mean `data/corpus_text_document`?"},
      {"not found: dataset.data_path = half.bin", ""},
      {"not found: dataset.data_path = data", "did you mean `data/corpus_text_document`?"}};
  REQUIRE(missing.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(missing[i].message == expected[i][0]);
    CHECK(holds(missing[i].help, expected[i][1]));
    CHECK(holds(missing[i].message, missing[i].field));
  }
  const std::string all = error_of([&] { require_files(missing); });
  CHECK(all.starts_with("not_found: the recipe names 8 files that do not exist:"));
  for (const auto& [message, help] : expected) CHECK(holds(all, message));
  // A resumed run has its own checkpoint; adapters still need the weights beside which they stand.
  const auto resumed = missing_files(c, true);
  CHECK(resumed.size() == 6);
  CHECK(resumed[0].field == "checkpoint.pretrained_checkpoint");
}

TEST_CASE("nothing is missed where everything is there, and mock data needs no files") {
  const Files files{"data/a.bin", "data/a.idx", "vocab.json", "merges.txt",
                    "run/checkpoints/step-00000002/x"};
  config::Config c;
  c.dataset.kind = config::DatasetKind::gpt;
  c.dataset.blend = {{files.path("data/a").resolved, 1.0}};
  c.tokenizer.tokenizer_type = config::TokenizerKind::gpt2_bpe;
  c.tokenizer.vocab_file = files.path("vocab.json");
  c.tokenizer.merge_file = files.path("merges.txt");
  c.tokenizer.chat_template = config::Path{"chatml", files.path("chatml").resolved};
  c.checkpoint.pretrained_checkpoint = files.path("run");
  CHECK(missing_files(c).empty());
  CHECK_NOTHROW(require_files({}));

  c.dataset.valid_blend = {{files.path("data/b").resolved, 1.0}};
  CHECK(missing_files(c)[0].message == "not found: dataset.valid_blend = " + files.path("data/b").resolved);
  c.dataset.kind = config::DatasetKind::mock;
  CHECK(missing_files(c).empty());
  c.dataset.kind = config::DatasetKind::sft;
  c.dataset.train_files = {files.path("merges.text")};
  const auto missing = missing_files(c);
  REQUIRE(missing.size() == 1);
  CHECK(error_of([&] { require_files(missing); }) ==
        "not_found: not found: dataset.train_files = merges.text\n  help: did you mean `merges.txt`?");
}

TEST_CASE("the directory of optimizer state exists, can be written and has the space") {
  config::Request request;
  request.recipe = "llama3-8b";
  for (const char* text : {"dist.world_size=1", "dist.cp=1", "train.device=checked"})
    request.overrides.push_back(config::Override::token(text));
  const config::Resolution resolution = config::resolve(request);
  resolution.require_ok();
  config::Config c = resolution.config;
  RunOptions options;
  options.recipe.name = "never";
  const Files files{"file", "there/x"};
  options.run_dir = files.path("run").resolved;
  const std::string field = "optimizer.optimizer_offload_path";
  const auto of_field = [&](const std::vector<MissingFile>& all) {
    std::vector<MissingFile> mine;
    for (const MissingFile& one : all)
      if (one.field == field) mine.push_back(one);
    return mine;
  };
  c.optimizer.optimizer_offload_path = files.path("gone");
  // Nothing is offloaded.
  CHECK(of_field(missing_files(c)).empty());
  c.optimizer.optimizer_cpu_offload = true;
  REQUIRE(of_field(missing_files(c)).size() == 1);
  CHECK(of_field(missing_files(c))[0].message == "not found: " + field + " = gone");
  CHECK(of_field(unwritable_directories(c, options)).empty());

  c.optimizer.optimizer_offload_path = files.path("file");
  const auto file = of_field(unwritable_directories(c, options));
  REQUIRE(file.size() == 1);
  CHECK(holds(file[0].message, "not writable: " + field + " = file: `"));
  CHECK(holds(file[0].message, "is a file, not a directory"));

  // A tenth of a thousandth of 8 billion parameters fits, an embedding of a billion tokens does not.
  c.optimizer.optimizer_offload_path = files.path("there");
  c.optimizer.optimizer_offload_fraction = 1e-4;
  CHECK(of_field(unwritable_directories(c, options)).empty());
  c.optimizer.optimizer_offload_fraction = 1;
  c.optimizer.optimizer_offload_chunk_size = int64_t{1} << 40;
  c.model.padded_vocab_size = 1'000'000'000;
  const auto full = of_field(unwritable_directories(c, options));
  REQUIRE(full.size() == 1);
  CHECK(holds(full[0].message, "too small: " + field + " = there: "));
  CHECK(holds(full[0].message, " TiB of optimizer state of 1 rank, "));
}

TEST_CASE("directories that a run cannot write are found, and none is made") {
  const Files files{"file", "there/x"};
  config::Config c;
  RunOptions options;
  options.recipe.name = "never";
  options.run_dir = files.path("there/runs/a").resolved;
  c.checkpoint.save = files.path("new/checkpoints");
  c.dataset.path_to_cache = files.path("there");
  CHECK(unwritable_directories(c, options).empty());
  CHECK_NOTHROW(require_writable({}));

  // A file in place of a parent, of the directory itself, and a link to nothing.
  std::filesystem::create_symlink("gone", files.directory.path() / "link");
  options.run_dir = files.path("file/runs/a").resolved;
  c.checkpoint.save = files.path("file");
  c.dataset.path_to_cache = files.path("link/cache");
  c.logger.tensorboard_dir = files.path("file/events");
  c.profiling.trace = true;
  c.profiling.trace_dir = files.path("file/traces");
  const auto found = unwritable_directories(c, options);
  const std::string file = files.path("file").resolved, link = files.path("link").resolved;
  const std::vector<std::array<std::string, 3>> expected = {
      {"name", "not writable: run directory = " + options.run_dir.string() + ": `" + file + "` is a file",
       "give {other_run_dir}"},
      {"checkpoint.save", "not writable: checkpoint.save = file: `" + file + "` is a file, not a directory",
       "checkpoint.save=PATH names another one"},
      {"dataset.path_to_cache", "`" + link + "` is a link whose target does not exist",
       "dataset.path_to_cache=PATH"},
      {"logger.tensorboard_dir", "`" + file + "` is a file", "logger.tensorboard_dir=PATH"},
      {"profiling.trace_dir", "`" + file + "` is a file", "profiling.trace_dir=PATH"}};
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(found[i].field == expected[i][0]);
    CHECK(holds(found[i].message, expected[i][1]));
    CHECK(holds(found[i].help, expected[i][2]));
  }
  const std::string all = error_of([&] { require_writable(found); });
  CHECK(all.starts_with("io: 5 directories of the run cannot be written:"));
  for (const MissingFile& one : found) CHECK(holds(all, one.message));

  // Only what the run uses.
  c.dataset.kind = config::DatasetKind::mock;
  c.logger.tensorboard = false;
  c.profiling.trace = false;
  CHECK(unwritable_directories(c, options).size() == 2);
  options.run_dir.clear();
  options.recipe.name = "a/b";
  CHECK(holds(unwritable_directories(c, options)[0].message, "`a/b` cannot name a directory in runs/"));
}

TEST_CASE("other kinds of files in place of data or of a directory are named") {
  const Files files{"x"};
  REQUIRE(::mkfifo(files.path("pipe").resolved.c_str(), 0600) == 0);
  config::Config c;
  c.dataset.kind = config::DatasetKind::sft;
  c.tokenizer.tokenizer_type = config::TokenizerKind::byte;
  const std::pair<std::string, std::string> kinds[] = {{files.path("pipe").resolved, "a named pipe"},
                                                       {"/dev/zero", "a device"},
                                                       {"/proc/self/status", "generated by the kernel"}};
  for (const auto& [path, kind] : kinds) {
    CAPTURE(path);
    c.dataset.train_files = {{path, path}};
    c.tokenizer.chat_template = config::Path{path, path};
    CHECK(missing_files(c).empty());
    const auto found = unusable_files(c, {}, Inspection::full);
    REQUIRE(found.size() == 1);
    CHECK(found[0].message.starts_with("`" + path + "` is " + kind));
  }
  RunOptions options;
  options.run_dir = files.path("run").resolved;
  const std::pair<std::string, std::string> places[] = {
      {files.path("pipe").resolved, " is a named pipe, not a directory"},
      {files.path("x").resolved, " is a file, not a directory"},
      {"/dev/null", " is a device, not a directory"},
      {"/proc", " is generated by the kernel: no file can be created there"},
      {"/proc/new/one", " is generated by the kernel: no file can be created there"}};
  for (const auto& [path, reason] : places) {
    c.checkpoint.save = config::Path{path, path};
    const auto found = unwritable_directories(c, options);
    REQUIRE(found.size() == 1);
    CHECK_MESSAGE(holds(found[0].message, reason), found[0].message);
  }
}

TEST_CASE("files below a directory that may not be entered are not called missing") {
  const Files files{"closed/a.jsonl", "closed/b.bin", "closed/b.idx", "closed/t.json"};
  const std::filesystem::path closed = files.directory.path() / "closed";
  config::Config c;
  c.tokenizer.tokenizer_type = config::TokenizerKind::huggingface;
  c.tokenizer.tokenizer_model = files.path("closed/t.json");
  c.tokenizer.chat_template = files.path("closed/t.jinja");
  c.dataset.kind = config::DatasetKind::gpt;
  c.dataset.data_path = {files.path("closed/b")};
  config::Config chats = c;
  chats.dataset.kind = config::DatasetKind::sft;
  chats.dataset.train_files = {files.path("closed/a.jsonl")};
  const bool root = ::geteuid() == 0;
  std::filesystem::permissions(closed, std::filesystem::perms(0));
  if (root) REQUIRE(::seteuid(65534) == 0);
  const auto found = missing_files(c), of_chats = missing_files(chats);
  if (root) REQUIRE(::seteuid(0) == 0);
  std::filesystem::permissions(closed, std::filesystem::perms(0755));
  REQUIRE(found.size() == 3);
  for (const MissingFile& one : found)
    CHECK(one.message == "not readable: " + one.field + " = " + one.name + ": Permission denied");
  REQUIRE(of_chats.size() == 3);
  CHECK(of_chats[2].message == "not readable: dataset.train_files = closed/a.jsonl: Permission denied");
}

TEST_CASE("names of the Hugging Face Hub in place of data: how to download a data set") {
  const Files files{"x"};
  config::Config c;
  c.tokenizer.tokenizer_type = config::TokenizerKind::byte;
  c.dataset.kind = config::DatasetKind::sft;
  c.dataset.train_files = {files.scheme("hf:", "an-org/chats")};
  c.dataset.train_files[0].text = "hf:an-org/chats";
  const auto missing = missing_files(c);
  REQUIRE(missing.size() == 1);
  CHECK(holds(missing[0].help, "hf download an-org/chats --repo-type dataset --local-dir data/chats"));
  c.dataset.kind = config::DatasetKind::gpt;
  c.dataset.data_path = c.dataset.train_files;
  const auto prefix = missing_files(c);
  REQUIRE(prefix.size() == 1);
  CHECK(holds(prefix[0].help, "hf download an-org/chats --repo-type dataset --local-dir data/chats"));
  CHECK(holds(prefix[0].help, "capstan data prepare"));
}

TEST_CASE("a directory without permission to write is named") {
  const Files files{"closed/x"};
  const std::filesystem::path closed = files.directory.path() / "closed";
  std::filesystem::permissions(closed, std::filesystem::perms(0555));
  config::Config c;
  RunOptions options;
  options.run_dir = files.path("closed/runs/a").resolved;
  // access(2) asks for the real user: root may write everywhere.
  const bool root = ::geteuid() == 0;
  if (root) REQUIRE(::setresuid(65534, 0, 0) == 0);
  const auto found = unwritable_directories(c, options);
  if (root) REQUIRE(::setresuid(0, 0, 0) == 0);
  REQUIRE(found.size() == 1);
  CHECK(holds(found[0].message, "`" + closed.string() + "`: Permission denied"));
}

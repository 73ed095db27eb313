#include "data/sft_dataset.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/philox.hpp"
#include "data/loader.hpp"
#include "data/sft_inspect.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

struct Row {
  std::vector<int32_t> tokens, labels, positions, bounds;
  std::vector<float> loss;
};
Row row_of(const Dataset& dataset, int64_t number) {
  const auto length = static_cast<size_t>(dataset.sequence_length());
  Row row;
  row.tokens.resize(length), row.labels.resize(length), row.positions.resize(length), row.loss.resize(length);
  dataset.row(number, {row.tokens, row.labels, row.loss, row.positions, &row.bounds});
  return row;
}

// A record whose prompt and completion have the given lengths in bytes, including the end token.
std::string line_of(int64_t prompt, int64_t completion, char letter) {
  return R"({"prompt": ")" + std::string(static_cast<size_t>(prompt), letter) + R"(", "completion": ")" +
         std::string(static_cast<size_t>(completion), static_cast<char>(letter - 32)) + "\"}\n";
}

SftOptions options_for(const std::vector<std::string>& files, int64_t length = 32) {
  static const auto tokenizer = text::byte_tokenizer();
  SftOptions options;
  options.train_files = files;
  options.split = "1,0,0";
  options.sequence_length = length;
  options.tokenizer = tokenizer.get();
  options.eod = tokenizer->eod();
  options.threads = 2;
  return options;
}

// 200 samples of 3 to 40 tokens.
std::string write_many(const TempDirectory& directory) {
  PhiloxSequence random(philox_key(7, purpose::test, 0));
  std::string text;
  for (int i = 0; i < 200; ++i)
    text += line_of(static_cast<int64_t>(1 + random.below(20)), static_cast<int64_t>(1 + random.below(19)),
                    static_cast<char>('a' + i % 26));
  const std::string path = directory / "many.jsonl";
  write_text(path, text);
  return path;
}

std::string learned_text(const SftDataset& dataset, int64_t sample) {
  std::string text;
  for (const uint32_t token : dataset.tokens(sample)) {
    const auto id = token & ~SftSamples::kLossToken;
    if (!(token & SftSamples::kLossToken)) continue;
    text += id == 256 ? '$' : static_cast<char>(id);
  }
  return text;
}

std::string error_for(const SftOptions& options) {
  try {
    build_sft_datasets(options);
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.message() +
           (error.help().empty() ? "" : " / " + error.help());
  }
  return "no error";
}

}  // namespace

TEST_CASE("the tokens that count in the loss follow the loss mode") {
  const TempDirectory directory;
  write_text(
      directory / "a.jsonl",
      R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A1"}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "B2"}]})"
      "\n");
  SftOptions options = options_for({directory / "a.jsonl"}, 400);
  options.chat_template = text::chat::ChatTemplate::load("chatml");
  const auto learned = [&](SftLoss loss) {
    options.loss = loss;
    return learned_text(*build_sft_datasets(options)[0], 0);
  };
  CHECK(learned(SftLoss::assistant) == "A1<|im_end|>B2<|im_end|>");
  CHECK(learned(SftLoss::last_turn) == "B2<|im_end|>");
  CHECK(learned(SftLoss::all).starts_with("<|im_start|>user\nQ<|im_end|>"));
  write_text(directory / "b.jsonl", R"({"prompt": "say ", "completion": "hi"})");
  options = options_for({directory / "b.jsonl"});
  CHECK(learned(SftLoss::assistant) == "hi$");
  CHECK(learned(SftLoss::all) == "say hi$");
  write_text(directory / "c.jsonl", R"({"text": "plain"})");
  options = options_for({directory / "c.jsonl"});
  CHECK(learned(SftLoss::assistant) == "plain$");
  options.loss = SftLoss::last_turn;
  const std::string no_turns = error_for(options);
  CHECK(no_turns.find("text have no turns") != std::string::npos);
  CHECK(no_turns.find("dataset.loss_mode=all") != std::string::npos);
  // Alpaca has a template of its own, conversations need one.
  write_text(directory / "d.jsonl", R"({"instruction": "Go.", "input": "", "output": "Gone."})");
  options = options_for({directory / "d.jsonl"}, 400);
  CHECK(learned(SftLoss::assistant) == "Gone.$");
  options = options_for({directory / "a.jsonl"});
  CHECK(error_for(options).starts_with("config: conversations need a chat template"));
  CHECK(error_for(options).find("tokenizer.chat_template=chatml") != std::string::npos);
}

TEST_CASE("a packed row holds documents that do not see each other") {
  const TempDirectory directory;
  write_text(directory / "a.jsonl",
             line_of(3, 4, 'a') + line_of(2, 2, 'b'));  // 8 and 5 tokens: 7 and 4 places
  const auto dataset = build_sft_datasets(options_for({directory / "a.jsonl"}, 16))[0];
  REQUIRE(dataset);
  CHECK(dataset->epoch_samples() == 1);
  const Row row = row_of(*dataset, 0);
  const bool first = row.tokens[0] == 'a';
  CHECK(row.bounds == (first ? std::vector<int32_t>{0, 7, 11, 16} : std::vector<int32_t>{0, 4, 11, 16}));
  for (size_t i = 0; i < 16; ++i) {
    const auto begin = *(std::upper_bound(row.bounds.begin(), row.bounds.end(), static_cast<int32_t>(i)) - 1);
    CHECK(row.positions[i] == static_cast<int32_t>(i) - begin);
    // A label is the document's next token, never another document's first.
    const bool last =
        std::find(row.bounds.begin(), row.bounds.end(), static_cast<int32_t>(i) + 1) != row.bounds.end();
    if (i < 11) CHECK(row.labels[i] == (last ? 256 : row.tokens[i + 1]));
    const bool upper = row.labels[i] >= 'A' && row.labels[i] <= 'Z';
    CHECK(row.loss[i] == (i < 11 && (upper || row.labels[i] == 256) ? 1.0f : 0.0f));
  }
}

TEST_CASE("packed or not, an epoch holds every sample once") {
  const TempDirectory directory;
  const std::string file = write_many(directory);
  for (const bool packing : {true, false})
    for (const uint64_t seed : {1u, 2u, 3u}) {
      SftOptions options = options_for({file}, 40);
      options.packing = packing, options.seed = seed;
      const auto dataset = build_sft_datasets(options)[0];
      const int64_t rows = dataset->epoch_samples();
      if (packing)
        // First-fit decreasing needs at most 11/9 of the minimal number of rows (Johnson 1973), which is at
        // least the number of positions over the row length.
        CHECK(9 * 40 * (rows - 1) <= 11 * (dataset->counts().tokens - dataset->counts().samples));
      else
        CHECK(rows == 200);
      std::multiset<int64_t> seen;
      double loss = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const auto samples = dataset->samples_of(r);
        CHECK(!samples.empty());
        seen.insert(samples.begin(), samples.end());
        const Row row = row_of(*dataset, r);
        loss += std::accumulate(row.loss.begin(), row.loss.end(), 0.0);
        CHECK(row.bounds.front() == 0);
        CHECK(row.bounds.back() == 40);
        CHECK(std::is_sorted(row.bounds.begin(), row.bounds.end()));
      }
      CHECK(seen.size() == 200);
      CHECK(std::set<int64_t>(seen.begin(), seen.end()).size() == 200);
      CHECK(loss == static_cast<double>(dataset->counts().loss_tokens));
      // Each epoch has its own order, which is the same on every rank and at every call.
      const auto order = [&](const SftDataset& of, int64_t first) {
        std::vector<std::vector<int64_t>> result;
        for (int64_t r = first; r < first + 20; ++r) result.push_back(of.samples_of(r));
        return result;
      };
      const auto again = build_sft_datasets(options)[0];
      CHECK(order(*again, 5 * rows) == order(*dataset, 5 * rows));
      CHECK(order(*dataset, 0) == order(*again, 0));
      CHECK(order(*dataset, 0) != order(*dataset, rows));
    }
}

TEST_CASE("packing fills rows") {
  const TempDirectory directory;
  const auto dataset = build_sft_datasets(options_for({write_many(directory)}, 128))[0];
  const double places = static_cast<double>(dataset->counts().tokens - dataset->counts().samples);
  CHECK(places / static_cast<double>(dataset->epoch_samples() * 128) > 0.95);
}

TEST_CASE("the loader gives the same rows to any number of workers, ranks and starts") {
  const TempDirectory directory;
  const auto dataset = build_sft_datasets(options_for({write_many(directory)}, 48))[0];
  const auto rows = [&](int workers, int64_t ranks, int64_t start) {
    std::map<uint64_t, std::vector<int32_t>> result;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      LoaderOptions options;
      options.data_parallel_rank = rank, options.data_parallel_size = ranks;
      options.micro_batch_size = 2, options.global_batch_size = 8;
      options.consumed_samples = start, options.num_workers = workers;
      Loader loader(dataset, options);
      while (loader.consumed_samples() < 400) {
        const MicroBatch batch = loader.next();
        for (size_t r = 0; r < 2; ++r) {
          if (batch.sample_ids[r] >= 80)
            result[batch.sample_ids[r]] =
                std::vector(batch.tokens.begin() + static_cast<std::ptrdiff_t>(48 * r),
                            batch.tokens.begin() + static_cast<std::ptrdiff_t>(48 * (r + 1)));
          // Behind the samples the row is padding.
          int64_t length = 0;
          for (const int64_t sample : dataset->samples_of(static_cast<int64_t>(batch.sample_ids[r])))
            length += std::ssize(dataset->tokens(sample)) - 1;
          CHECK(batch.lengths.at(r) == length);
        }
      }
    }
    return result;
  };
  const auto one = rows(0, 1, 0);
  CHECK(one.size() == 320);
  CHECK(rows(3, 1, 0) == one);
  CHECK(rows(2, 4, 0) == one);
  CHECK(rows(1, 2, 80) == one);
}

TEST_CASE("long samples are truncated or dropped, and counted") {
  const TempDirectory directory;
  write_text(directory / "a.jsonl", line_of(3, 4, 'a') + line_of(3, 40, 'b') + line_of(40, 3, 'c'));
  SftOptions options = options_for({directory / "a.jsonl"}, 20);
  const auto truncated = build_sft_datasets(options)[0];
  CHECK(truncated->counts().records == 3);
  CHECK(truncated->counts().samples == 2);
  CHECK(truncated->counts().truncated == 1);
  CHECK(truncated->counts().without_loss == 1);  // nothing of its completion is left
  CHECK(truncated->tokens(1).size() == 21);
  CHECK(truncated->counts().truncated_answers == 1);
  CHECK(truncated->summary().find("1 truncated; 1 left out without loss tokens (1 of them by truncation to "
                                  "model.seq_length)") != std::string::npos);
  CHECK(
      truncated->warnings()[0].starts_with("1 sample has no loss tokens and was left out (1 by truncation: "
                                           "a larger model.seq_length keeps the answers):\n"));
  // The same two samples in two splits: the counts are those of both.
  SftOptions divided = options;
  divided.split = "1,1,0";
  CHECK(build_sft_datasets(divided)[0]->summary().ends_with("model.seq_length) (in all splits)"));
  options.truncate = false;
  const auto dropped = build_sft_datasets(options)[0];
  CHECK(dropped->counts().samples == 1);
  CHECK(dropped->counts().dropped == 2);
  CHECK(dropped->summary().find("2 dropped as too long") != std::string::npos);
  options.sequence_length = 4;
  CHECK(error_for(options).starts_with(
      "failed: no sample of the training files has loss tokens (3 read; 3 dropped as too long)"));
  options.truncate = true;
  options.sequence_length = 2;
  CHECK(
      error_for(options) ==
      "failed: no sample of the training files has loss tokens (3 read; 3 left out without loss tokens (3 of "
      "them by truncation to model.seq_length)) / a larger model.seq_length: the answers begin after token "
      "2");
}

TEST_CASE("splits: shares of one list, or files") {
  const TempDirectory directory;
  const std::string file = write_many(directory);
  SftOptions options = options_for({file}, 64);
  options.split = "90,10,0";
  auto splits = build_sft_datasets(options);
  REQUIRE(splits[1]);
  CHECK(!splits[2]);
  CHECK(splits[0]->counts().samples == 180);
  CHECK(splits[1]->counts().samples == 20);
  CHECK(splits[1]->location(0) == file + ":181");
  options.max_train_samples = 50;
  CHECK(build_sft_datasets(options)[0]->counts().samples == 50);
  write_text(directory / "v.jsonl", line_of(3, 4, 'v'));
  options.valid_files = {directory / "v.jsonl"};
  splits = build_sft_datasets(options);
  CHECK(splits[0]->counts().samples == 50);
  CHECK(splits[1]->counts().samples == 1);
  CHECK(!splits[2]);
  // The share is so small that it holds no sample.
  options = options_for({directory / "v.jsonl"});
  options.split = "969,30,1";
  splits = build_sft_datasets(options);
  CHECK(splits[0]);
  CHECK(!splits[1]);
}

TEST_CASE("bad lines are errors with their location, or skipped and counted") {
  const TempDirectory directory;
  write_text(directory / "a.jsonl",
             line_of(3, 4, 'a') + "{\"prompt\": \"x\"}\n\n" + line_of(2, 2, 'b') + "{\"prompt\": oops}\n");
  SftOptions options = options_for({directory / "a.jsonl"});
  CHECK(error_for(options) == "format: " + directory / "a.jsonl" +
                                  ":2:1: the sample has no `completion`\n    " + directory / "a.jsonl" +
                                  ":5:12: not JSON: syntax error while parsing value - invalid literal; last "
                                  "read: '\"prompt\": o' / dataset.on_bad_line=skip leaves such "
                                  "lines out and counts them");
  // Many bad lines: the first ones, and how many follow.
  std::string many;
  for (int i = 0; i < 25; ++i) many += "{\"prompt\": \"x\"}\n" + line_of(2, 2, 'b');
  write_text(directory / "many.jsonl", many);
  const std::string all = error_for(options_for({directory / "many.jsonl"}));
  CHECK(all.find(":19:1: ") != std::string::npos);
  CHECK(all.find(":21:1: ") == std::string::npos);
  CHECK(all.find("\n    and 15 further bad lines / ") != std::string::npos);
  options.on_bad_line = OnBadLine::skip;
  const auto dataset = build_sft_datasets(options)[0];
  CHECK(dataset->counts().samples == 2);
  CHECK(dataset->counts().bad == 2);
  REQUIRE(dataset->counts().reports.size() == 2);
  CHECK(dataset->counts().reports[1].starts_with(directory / "a.jsonl" + ":5:12: not JSON"));
  // A line above the limit, and a conversation that the template rejects.
  options.max_record_bytes = 20;
  CHECK(error_for(options).find("no sample of the training files has loss tokens") != std::string::npos);
  CHECK(error_for(options).find("\n    " + directory / "a.jsonl" + ":1:") != std::string::npos);
  write_text(
      directory / "b.jsonl",
      R"({"messages": [{"role": "assistant", "content": "first"}, {"role": "user", "content": "u"}]})");
  options = options_for({directory / "b.jsonl"}, 100);
  options.chat_template = text::chat::ChatTemplate::load("gemma");
  CHECK(error_for(options).find("b.jsonl:1:1: chat template gemma:") != std::string::npos);
  CHECK(error_for(options).find("roles must alternate") != std::string::npos);
  CHECK(error_for(options_for({directory / "none.jsonl"})).starts_with("not_found: "));
}

TEST_CASE("empty answers, samples without loss tokens and bad lines are reported with their locations") {
  const TempDirectory directory;
  const std::string file = directory / "a.jsonl";
  const std::string user = R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", )";
  write_text(
      file,
      user + R"("content": "a"}]})" + "\n" +        // 1: sound
          user + R"("content": " \n"}]})" + "\n" +  // 2: empty
          user + R"("content": "", "tool_calls": [{"name": "f", "arguments": {}}]}]})" + "\n" + user +
          R"("content": "", "weight": 0}]})" + "\n" +  // 4: no loss tokens
          "{}\n" +                                     // 5: no sample
          user +
          R"("content": ""}, {"role": "user", "content": "v"}, {"role": "assistant", "content": "b"}]})");
  SftOptions options = options_for({file}, 200);
  options.chat_template = text::chat::ChatTemplate::load("chatml");
  options.format = SftFormat::messages;
  options.on_bad_line = OnBadLine::skip;
  const auto dataset = build_sft_datasets(options)[0];
  CHECK(dataset->counts().empty_locations == std::vector<std::string>{file + ":2", file + ":6"});
  CHECK(dataset->counts().without_loss_locations == std::vector<std::string>{file + ":4"});
  const auto warnings = dataset->warnings();
  REQUIRE(warnings.size() == 4);
  CHECK(warnings[0].starts_with("1 line is not a valid sample and was skipped:\n    " + file + ":5:1: "));
  CHECK(warnings[1] == "1 sample has no loss tokens and was left out:\n    " + file + ":4");
  CHECK(warnings[2] == "2 samples have an empty answer:\n    " + file + ":2\n    " + file + ":6");
  // The byte tokenizer has no token for the end of a turn, so an exported model would not stop there.
  CHECK(
      warnings[3].starts_with("chat template chatml ends an answer with `<|im_end|>`, which the "
                              "tokenizer does not encode as one token"));
  write_text(directory / "t.jinja",
             "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
             "{% endfor %}");
  options.chat_template = text::chat::ChatTemplate::load(directory / "t.jinja");
  CHECK(build_sft_datasets(options)[0]->warnings().size() == 3);
  const std::string text = to_text_report(inspect_sft(*dataset, *options.tokenizer, 3, 64), false);
  CHECK(text.find("empty answer: " + file + ":6\n") != std::string::npos);
  CHECK(text.find("no loss tokens, left out: " + file + ":4\n") != std::string::npos);
  write_text(file, line_of(3, 4, 'a') + line_of(3, 0, 'a'));
  CHECK(build_sft_datasets(options_for({file}))[0]->warnings() ==
        std::vector<std::string>{"1 sample has an empty answer:\n    " + file + ":2"});
  write_text(file, line_of(3, 4, 'a'));
  CHECK(build_sft_datasets(options_for({file}))[0]->warnings().empty());
}

TEST_CASE("epochs of fine-tuning data consist of the rows of complete epochs") {
  const TempDirectory directory;
  const auto dataset = build_sft_datasets(options_for({write_many(directory)}, 64))[0];
  int64_t samples = 0, row = 0;
  for (; samples < 3 * 200; ++row) samples += static_cast<int64_t>(dataset->samples_of(row).size());
  CHECK(samples == 600);
  CHECK(dataset->samples_in(3) == row);
  CHECK(dataset->samples_in(1) == dataset->epoch_samples());
  CHECK(dataset->samples_in(0.001) == 1);
  CHECK(dataset->samples_in(2.5) > dataset->samples_in(2));
  CHECK(dataset->samples_in(2.5) < row);
  CHECK(error_of([&] { dataset->samples_in(1e9); }).starts_with("config: "));
}

TEST_CASE("the fingerprint identifies the samples and their layout") {
  const TempDirectory directory;
  const std::string file = write_many(directory);
  const SftOptions options = options_for({file}, 64);
  const auto fingerprint = [](const SftOptions& o) { return build_sft_datasets(o)[0]->fingerprint(); };
  const std::string same = fingerprint(options);
  std::filesystem::copy(file, directory / "moved.jsonl");
  CHECK(fingerprint(options_for({directory / "moved.jsonl"}, 64)) == same);
  std::set<std::string> all = {same};
  SftOptions other = options;
  other.seed = 9, all.insert(fingerprint(other)), other = options;
  other.packing = false, all.insert(fingerprint(other)), other = options;
  other.sequence_length = 65, all.insert(fingerprint(other)), other = options;
  other.loss = SftLoss::all, all.insert(fingerprint(other)), other = options;
  other.max_train_samples = 199, all.insert(fingerprint(other));
  CHECK(all.size() == 6);
}

TEST_CASE("inspection shows three conversations though they share a row") {
  const TempDirectory directory;
  std::string lines;
  for (const char letter : {'a', 'b', 'c', 'd', 'e'}) lines += line_of(20, 10, letter);
  write_text(directory / "a.jsonl", lines);
  const auto options = options_for({directory / "a.jsonl"}, 200);
  const auto report = inspect_sft(*build_sft_datasets(options)[0], *options.tokenizer, 3, 31);
  REQUIRE(report.rows == 1);
  REQUIRE(report.shown[0].documents.size() == 5);
  for (size_t i = 0; i < 5; ++i) CHECK(report.shown[0].documents[i].ids.size() == (i < 3 ? 31u : 0u));
  const std::string text = to_text_report(report, false);
  CHECK(text.find("a.jsonl:4, 31 tokens") == std::string::npos);
  CHECK(text.ends_with("--- and 2 more documents\n"));
  // Three in all, too, if there are two rows.
  SftOptions two = options;
  two.sequence_length = 100;
  const auto both = inspect_sft(*build_sft_datasets(two)[0], *options.tokenizer, 3, 31);
  REQUIRE(both.shown.size() == 2);
  int64_t printed = 0;
  for (const auto& row : both.shown)
    for (const auto& document : row.documents) printed += document.ids.empty() ? 0 : 1;
  CHECK(printed == 3);
  // If there are enough rows, one document of each is shown.
  SftOptions narrow = options;
  narrow.sequence_length = 62;
  const auto rows = inspect_sft(*build_sft_datasets(narrow)[0], *options.tokenizer, 3, 31);
  REQUIRE(rows.shown.size() == 3);
  for (const auto& row : rows.shown) {
    CHECK(row.documents[0].ids.size() == 31);
    for (size_t i = 1; i < row.documents.size(); ++i) CHECK(row.documents[i].ids.empty());
  }
}

TEST_CASE("inspection shows what is learned") {
  const TempDirectory directory;
  write_text(directory / "a.jsonl", R"({"prompt": "say ", "completion": "hi\u001b[2J"})");
  const auto options = options_for({directory / "a.jsonl"}, 32);
  const auto report = inspect_sft(*build_sft_datasets(options)[0], *options.tokenizer, 3, 512);
  REQUIRE(report.shown.size() == 1);
  const std::string plain = to_text_report(report, false);
  CHECK(plain.find("row 0: 1 document, 10 of 32 positions, 7 loss tokens") != std::string::npos);
  CHECK(plain.find("a.jsonl:1, 11 tokens, 7 loss tokens\nsay ⟦hi\\x1b[2J<|endoftext|>⟧\n") !=
        std::string::npos);
  CHECK(to_text_report(report, true).find("say \x1b[32mhi\\x1b[2J<|endoftext|>\x1b[0m") != std::string::npos);
  const auto json = capstan::json_of(to_json_report(report));
  CHECK(json["loss_tokens"] == 7);
  CHECK(json["shown"][0]["documents"][0]["loss_tokens"] == 7);
  CHECK(json["shown"][0]["documents"][0]["loss"] == std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1});
}

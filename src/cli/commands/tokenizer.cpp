// capstan tokenizer train | encode | decode
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "data/record_reader.hpp"
#include "text/tokenizer/encode_file.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "text/tokenizer/train_bpe.hpp"

namespace capstan::cli {

namespace {

// "reading 1.2 MiB of 3.4 MiB", "counting 1 000 words", "merging 10 of 4 096 tokens".
std::string progress_text(const text::TrainProgress& now) {
  const bool reads = now.phase == "reading";
  const auto amount = [&](int64_t done) {
    return reads ? human_bytes(static_cast<double>(done)) : with_separators(done);
  };
  return std::string(now.phase) + " " + amount(now.done) +
         (now.total > 0 ? " of " + amount(now.total) : std::string()) +
         (now.phase == "counting"  ? " words"
          : now.phase == "merging" ? " tokens"
                                   : "");
}

int workers(const Arguments& args) {
  return static_cast<int>(args.integer("workers", 0, 1024).value_or(0));
}

// Reads the documents of the input files: plain text, or the string under `key` of each JSON object.
class Documents {
 public:
  Documents(const std::vector<std::string>& names, data::RecordOptions options, std::string key)
      : reader_(data::expand_inputs(names), std::move(options)), key_(std::move(key)) {}

  bool next(std::string& document) {
    while (at_ == batch_.records.size()) {
      at_ = 0;
      if (!reader_.next(batch_, int64_t{4} << 20)) return false;
    }
    const data::Record& record = batch_.records[at_++];
    const std::string location = reader_.files()[static_cast<size_t>(record.file)].path + ":" +
                                 std::to_string(record.line) + ":" + std::to_string(record.column);
    if (!record.problem.empty()) fail(ErrorCode::format, location + ": " + record.problem);
    const std::string_view text = batch_.of(record);
    if (!record.json) return document.assign(text), true;
    const auto value = json_of(text, IfNotJson::discard);
    if (value.is_discarded()) fail(ErrorCode::format, location + ": this is not a JSON value");
    if (!value.is_object() || !value.contains(key_) || !value[key_].is_string())
      fail(ErrorCode::format, location + ": no text under `" + key_ + "`",
           "--json-key names the key that holds the text");
    document = value[key_].get<std::string>();
    return true;
  }

  const HtmlPages& html_pages() const { return reader_.html_pages(); }

 private:
  data::RecordReader reader_;
  std::string key_;
  data::RecordBatch batch_;
  size_t at_ = 0;
};

int run_tokenizer_train(Context& context) {
  const Arguments& args = context.args;
  if (args.words().empty()) fail(ErrorCode::usage, "FILE is missing", "name the text files to train on");
  text::TrainOptions options;
  options.vocab_size = args.integer("vocab-size", 257, 1 << 30).value_or(0);
  if (options.vocab_size == 0) args.required("vocab-size");
  options.min_frequency = args.integer("min-frequency", 1).value_or(2);
  options.pre_tokenizer = text::pre_tokenizer_by_name(args.value("pre-tokenizer").value_or("gpt2"));
  if (const auto special = args.value("special")) {
    options.special_tokens.clear();
    for (const std::string_view token : split(*special, ',')) options.special_tokens.emplace_back(token);
  }
  const std::filesystem::path output = args.required("output");
  std::error_code unknown;
  if (!args.has("overwrite") && std::filesystem::exists(std::filesystem::symlink_status(output, unknown)))
    fail(ErrorCode::usage, "`" + output.string() + "` exists already",
         "choose another --output, or give --overwrite");

  data::RecordOptions records;
  const std::string how = args.value("documents").value_or(args.has("separator") ? "separator" : "auto");
  using data::TextSplit;
  // A file is one document by default.
  records.split = how == "blank-line"  ? TextSplit::blank_line
                  : how == "separator" ? TextSplit::separator
                                       : TextSplit::file;
  records.separator = args.value("separator").value_or("%");
  ThreadPool pool(workers(args));

  Progress progress(!context.quiet(), context.color_err);
  progress.plain_status_every(std::chrono::seconds(10));
  progress.line("training a tokenizer of " + std::to_string(options.vocab_size) + " tokens");
  const auto report = [&](const text::TrainProgress& now) { progress.status(progress_text(now)); };
  Documents documents(args.words(), records, args.value("json-key").value_or("text"));
  const std::string text =
      text::train_bpe([&](std::string& document) { return documents.next(document); }, options, pool, report);
  report_html_pages(progress, documents.html_pages());
  if (output.has_parent_path()) std::filesystem::create_directories(output.parent_path());
  write_file_durably(output, text);
  const int64_t trained = text::Tokenizer::from_json(text, output.string())->vocab_size();
  put(output.string() + ": " + with_separators(trained) + " tokens\n");
  if (trained < options.vocab_size)
    progress.line("note: the text has no more pairs that occur " + std::to_string(options.min_frequency) +
                  " times; --min-frequency 1 allows rarer ones");
  return 0;
}

int run_tokenizer_encode(Context& context) {
  const Arguments& args = context.args;
  const std::string& file = args.word(0, "FILE");
  const auto tokenizer = tokenizer_argument(context).tokenizer;
  ThreadPool pool(workers(args));
  const text::EncodeOptions options{.specials_as_text = args.has("specials-as-text"),
                                    .add_special = args.has("add-special")};
  text::encode_file(
      *tokenizer, file, [](std::string_view text) { put(text); }, pool, {}, options, args.has("offsets"));
  return 0;
}

int run_tokenizer_decode(Context& context) {
  const Arguments& args = context.args;
  const std::string& file = args.word(0, "FILE");
  const auto tokenizer = tokenizer_argument(context).tokenizer;
  ThreadPool pool(workers(args));
  text::decode_file(
      *tokenizer, file, [](std::string_view text) { put(text); }, pool);
  return 0;
}

}  // namespace

const Command kTokenizerTrain = {
    .name = "tokenizer train",
    .purpose = "train a byte-level BPE tokenizer on text",
    .usage = "FILE… --vocab-size N --output tokenizer.json [flags]",
    .examples = {{"tokenizer train corpus.txt --vocab-size 32000 --output tokenizer.json", ""},
                 {"tokenizer train a.jsonl b.jsonl --vocab-size 50000 -o t.json --pre-tokenizer llama3", ""},
                 {"tokenizer train quotes.txt --separator % --vocab-size 4096 -o t.json",
                  "documents between lines of `%`"}},
    .options =
        {{"vocab-size", 0, "N", "size of the vocabulary: special tokens, 256 bytes and merges"},
         {"output", 'o', "FILE", "the tokenizer.json to write; Hugging Face tokenizers loads it"},
         {"overwrite", 0, "", "replace a file of that name"},
         {"pre-tokenizer", 0, "NAME", "rule that splits text into words: gpt2 (default), llama3 or qwen2", "",
          "gpt2 llama3 qwen2"},
         {"min-frequency", 0, "N", "smallest number of occurrences of a pair that is merged; default 2"},
         {"special", 0, "TOKEN,…", "special tokens, the first ids; default <|endoftext|>"},
         {"documents", 0, "HOW", "end of a document of plain text: file (default), blank-line or separator"},
         {"separator", 0, "LINE", "line that separates documents"},
         {"json-key", 0, "KEY", "key of the text in .json and .jsonl files; default text"},
         {"workers", 0, "N", "number of threads; default: the cores of this process"}},
    .details = "The same files and options give the same tokenizer.json, whatever the number of threads.\n",
    .max_words = SIZE_MAX,
    .run = run_tokenizer_train,
};

const Command kTokenizerEncode = {
    .name = "tokenizer encode",
    .purpose = "encode text to token ids, line by line",
    .usage = "FILE --tokenizer tokenizer.json [flags]",
    .examples = {{"tokenizer encode lines.txt --tokenizer tokenizer.json", "one {\"ids\":[…]} for each line"},
                 {"tokenizer encode lines.txt -r quickstart", "with the tokenizer of a recipe"}},
    .options = {{"tokenizer", 't', "FILE",
                 "tokenizer.json, SentencePiece .model, a directory with one, or `bytes`"},
                {"recipe", 'r', "RECIPE", "use the tokenizer of a recipe; overrides apply to the recipe"},
                {"specials-as-text", 0, "", "encode special tokens inside the text as ordinary text"},
                {"add-special", 0, "", "add the special tokens that the tokenizer puts around a text"},
                {"offsets", 0, "", "adds \"offsets\": the byte range [begin, end) of each token in the line"},
                {"workers", 0, "N", "number of threads; default: the cores of this process"}},
    .details =
        "Lines end at \\n only, nothing is trimmed; no special tokens are added around a line unless asked "
        "for.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_tokenizer_encode,
};

const Command kTokenizerDecode = {
    .name = "tokenizer decode",
    .purpose = "decode token ids to text",
    .usage = "FILE --tokenizer tokenizer.json [flags]",
    .examples = {{"tokenizer decode ids.jsonl --tokenizer tokenizer.json", "lines of {\"ids\":[…]}"}},
    .options = {{"tokenizer", 't', "FILE",
                 "tokenizer.json, SentencePiece .model, a directory with one, or `bytes`"},
                {"recipe", 'r', "RECIPE", "use the tokenizer of a recipe; overrides apply to the recipe"},
                {"workers", 0, "N", "number of threads; default: the cores of this process"}},
    .details = "Writes the bytes of the tokens unchanged: decode restores the input of encode.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_tokenizer_decode,
};

}  // namespace capstan::cli

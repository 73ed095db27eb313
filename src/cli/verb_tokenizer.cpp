// capstan tokenizer train | encode | decode
#include <charconv>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "data/input_stream.hpp"
#include "data/record_reader.hpp"
#include "data/tokenizer/tokenizer.hpp"
#include "data/tokenizer/train_bpe.hpp"

namespace capstan::cli {

namespace {

constexpr std::string_view kPreTokenizers[] = {"gpt2", "llama3", "qwen2"};
constexpr std::string_view kDocuments[] = {"auto", "blank-line", "separator", "file"};

// The documents of the input files: text as it is, of a JSON object the string under `key`.
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
    const std::string place = reader_.files()[static_cast<size_t>(record.file)].path + ":" + std::to_string(record.line) + ":" +
                              std::to_string(record.column);
    if (!record.problem.empty()) fail(ErrorCode::format, place + ": " + record.problem);
    const std::string_view text = batch_.of(record);
    if (!record.json) return document.assign(text), true;
    const auto value = nlohmann::json::parse(text, nullptr, false);
    if (value.is_discarded()) fail(ErrorCode::format, place + ": this is not a JSON value");
    if (!value.is_object() || !value.contains(key_) || !value[key_].is_string())
      fail(ErrorCode::format, place + ": no text under `" + key_ + "`", "--json-key names the key that holds the text");
    document = value[key_].get<std::string>();
    return true;
  }

 private:
  data::RecordReader reader_;
  std::string key_;
  data::RecordBatch batch_;
  size_t at_ = 0;
};

int run_tokenizer_train(Context& context) {
  const Arguments& args = context.args;
  if (args.words().empty()) fail(ErrorCode::usage, "FILE is missing", "name the text files to learn from");
  data::TrainOptions options;
  options.vocab_size = args.integer("vocab-size", 257, 1 << 30).value_or(0);
  if (options.vocab_size == 0) args.required("vocab-size");
  options.min_frequency = args.integer("min-frequency", 1).value_or(2);
  options.pre_tokenizer = data::pre_tokenizer_by_name(args.choice("pre-tokenizer", kPreTokenizers, "gpt2"));
  if (args.has("special")) {
    options.special_tokens.clear();
    for (std::string_view token : split(*args.value("special"), ',')) options.special_tokens.emplace_back(token);
  }
  const std::filesystem::path output = args.required("output");

  data::RecordOptions records;
  const std::string how = args.choice("documents", kDocuments, args.has("separator") ? "separator" : "auto");
  using data::TextSplit;
  // For learning a vocabulary a file is one long text unless it says otherwise.
  records.split = how == "blank-line" ? TextSplit::blank_line : how == "separator" ? TextSplit::separator : TextSplit::file;
  records.separator = args.value("separator").value_or("%");
  ThreadPool pool(static_cast<int>(args.integer("workers", 0, 1024).value_or(0)));

  Progress progress(!context.quiet(), context.color_err);
  progress.plain_status_every(std::chrono::seconds(10));
  progress.line("learning " + std::to_string(options.vocab_size) + " tokens");
  const auto report = [&](const data::TrainProgress& now) {
    progress.status(std::string(now.phase) + " " + with_separators(now.done) +
                    (now.total > 0 ? " of " + with_separators(now.total) : ""));
  };
  Documents documents(args.words(), records, args.value("json-key").value_or("text"));
  const std::string text =
      data::train_bpe([&](std::string& document) { return documents.next(document); }, options, pool, report);
  if (output.has_parent_path()) std::filesystem::create_directories(output.parent_path());
  write_file_durably(output, text);
  const int64_t learned = data::Tokenizer::from_json(text, output.string())->vocab_size();
  put(output.string() + ": " + with_separators(learned) + " tokens\n");
  if (learned < options.vocab_size)
    progress.line("note: the text has no more pairs that occur " + std::to_string(options.min_frequency) +
                  " times; --min-frequency 1 would go on");
  return 0;
}

// Lines of a file or of standard input, a batch at a time. A line ends at \n only; nothing is trimmed.
class LineBatches {
 public:
  explicit LineBatches(const std::string& name) : stream_(name == "-" ? "/dev/stdin" : name) {}
  // The complete lines of about a megabyte; false when nothing is left.
  bool next(std::vector<std::string_view>& lines) {
    lines.clear();
    text_.erase(0, used_);
    used_ = 0;
    while (!ended_ && (text_.size() < kBatch || text_.find('\n') == std::string::npos)) {
      const size_t before = text_.size();
      text_.resize(before + kBatch);
      const size_t got = stream_.read({text_.data() + before, kBatch});
      text_.resize(before + got);
      ended_ = got == 0;
    }
    while (used_ < text_.size()) {
      const size_t end = text_.find('\n', used_);
      if (end == std::string::npos && !ended_) break;
      const size_t length = (end == std::string::npos ? text_.size() : end) - used_;
      lines.push_back(std::string_view(text_).substr(used_, length));
      used_ += length + (end == std::string::npos ? 0 : 1);
    }
    return !lines.empty();
  }

 private:
  static constexpr size_t kBatch = size_t{1} << 20;
  data::InputStream stream_;
  std::string text_;
  size_t used_ = 0;
  bool ended_ = false;
};

void append_ids(std::string& out, const std::vector<int32_t>& ids) {
  out += "{\"ids\":[";
  for (size_t i = 0; i < ids.size(); ++i) {
    char digits[16];
    const auto end = std::to_chars(digits, digits + sizeof digits, ids[i]).ptr;
    if (i > 0) out += ',';
    out.append(digits, end);
  }
  out += "]}\n";
}

int run_tokenizer_encode(Context& context) {
  const Arguments& args = context.args;
  const auto tokenizer = data::Tokenizer::load(tokenizer_argument(context));
  LineBatches batches(args.word(0, "FILE"));
  ThreadPool pool(static_cast<int>(args.integer("workers", 0, 1024).value_or(0)));
  const data::EncodeOptions options{.specials_as_text = args.has("specials-as-text")};
  std::vector<std::string_view> lines;
  constexpr size_t kTile = 64;
  while (batches.next(lines)) {
    const size_t tiles = (lines.size() + kTile - 1) / kTile;
    std::vector<std::string> parts(tiles);
    pool.parallel_for(static_cast<int64_t>(tiles), [&](int64_t tile, int) {
      std::vector<int32_t> ids;
      const size_t begin = static_cast<size_t>(tile) * kTile;
      for (size_t i = begin; i < std::min(begin + kTile, lines.size()); ++i) {
        ids.clear();
        tokenizer->encode(lines[i], ids, options);
        append_ids(parts[static_cast<size_t>(tile)], ids);
      }
    });
    for (const std::string& part : parts) put(part);
  }
  return 0;
}

int run_tokenizer_decode(Context& context) {
  const Arguments& args = context.args;
  const auto tokenizer = data::Tokenizer::load(tokenizer_argument(context));
  const std::string& file = args.word(0, "FILE");
  LineBatches batches(file);
  const bool skip_special = args.has("skip-special");
  std::vector<std::string_view> lines;
  std::vector<int32_t> ids;
  int64_t number = 0;
  while (batches.next(lines)) {
    for (const std::string_view line : lines) {
      ++number;
      const std::string place = file + ":" + std::to_string(number);
      const auto value = nlohmann::json::parse(line, nullptr, false);
      const nlohmann::json* list = value.is_array() ? &value : nullptr;
      if (value.is_object() && value.contains("ids")) list = &value["ids"];
      if (value.is_discarded() || !list || !list->is_array())
        fail(ErrorCode::format, place + ": this line is not {\"ids\":[…]}", "`capstan tokenizer encode` writes such lines");
      ids.clear();
      for (const auto& item : *list) {
        const bool fits = item.is_number_integer() && item.get<double>() >= 0 &&
                          item.get<double>() < static_cast<double>(tokenizer->vocab_size());
        if (!fits)
          fail(ErrorCode::format, place + ": " + item.dump() + " is not an id of this tokenizer",
               "ids go from 0 to " + std::to_string(tokenizer->vocab_size() - 1));
        ids.push_back(item.get<int32_t>());
      }
      put(tokenizer->decode_bytes(ids, skip_special) + "\n");
    }
  }
  return 0;
}

}  // namespace

const Verb kTokenizerTrain = {
    .name = "tokenizer train",
    .purpose = "learn a byte-level BPE vocabulary from text",
    .usage = "FILE… --vocab-size N --output tokenizer.json [flags]",
    .examples = {{"tokenizer train corpus.txt --vocab-size 32000 --output tokenizer.json", ""},
                 {"tokenizer train a.jsonl b.jsonl --vocab-size 50000 -o t.json --pre-tokenizer llama3", ""},
                 {"tokenizer train quotes.txt --separator % --vocab-size 4096 -o t.json", "documents between lines of `%`"}},
    .options = {{"vocab-size", 0, "N", "entries in all: special tokens, 256 bytes, merges"},
                {"output", 'o', "FILE", "the tokenizer.json to write; Hugging Face tokenizers loads it"},
                {"pre-tokenizer", 0, "NAME", "gpt2 (default), llama3 or qwen2"},
                {"min-frequency", 0, "N", "pairs that are rarer are not merged; default 2"},
                {"special", 0, "TOKEN,…", "special tokens, the first ids; default <|endoftext|>"},
                {"documents", 0, "HOW", "what ends a document of plain text: file (default), blank-line or separator"},
                {"separator", 0, "LINE", "documents are separated by this line"},
                {"json-key", 0, "KEY", "of .json and .jsonl files the text under this key; default text"},
                {"workers", 0, "N", "threads; default: the cores of this process"}},
    .details = "The same files and options give the same tokenizer.json, whatever the number of threads.\n",
    .max_words = SIZE_MAX,
    .run = run_tokenizer_train,
};

const Verb kTokenizerEncode = {
    .name = "tokenizer encode",
    .purpose = "text to token ids, a line at a time",
    .usage = "FILE --tokenizer tokenizer.json [flags]",
    .examples = {{"tokenizer encode lines.txt --tokenizer tokenizer.json", "one {\"ids\":[…]} for each line"},
                 {"tokenizer encode - -r quickstart", "standard input, the tokenizer of a recipe"}},
    .options = {{"tokenizer", 't', "FILE", "tokenizer.json, a directory with one, or `bytes`"},
                {"recipe", 'r', "RECIPE", "take the tokenizer of a recipe instead; overrides apply to it"},
                {"specials-as-text", 0, "", "special tokens inside the text are ordinary text"},
                {"workers", 0, "N", "threads; default: the cores of this process"}},
    .details = "Lines end at \\n only, nothing is trimmed, no special tokens are added around a line.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_tokenizer_encode,
};

const Verb kTokenizerDecode = {
    .name = "tokenizer decode",
    .purpose = "token ids back to text",
    .usage = "FILE --tokenizer tokenizer.json [flags]",
    .examples = {{"tokenizer decode ids.jsonl --tokenizer tokenizer.json", "lines of {\"ids\":[…]} or of [ids]"}},
    .options = {{"tokenizer", 't', "FILE", "tokenizer.json, a directory with one, or `bytes`"},
                {"recipe", 'r', "RECIPE", "take the tokenizer of a recipe instead; overrides apply to it"},
                {"skip-special", 0, "", "leave special tokens out"}},
    .details = "The bytes that the ids stand for are written as they are: decode gives back what encode read.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_tokenizer_decode,
};

}  // namespace capstan::cli

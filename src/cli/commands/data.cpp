// capstan data prepare | inspect
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "config/core/library.hpp"
#include "config/sections/data_sources.hpp"
#include "data/inspect.hpp"
#include "data/prepare_report.hpp"
#include "data/sft_inspect.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/data_setup.hpp"

namespace capstan::cli {

namespace {

// The value of an option whose choices the parser has checked; without the option, the first.
template <class T>
T choice(const Arguments& args, std::string_view option,
         std::initializer_list<std::pair<std::string_view, T>> values) {
  const auto given = args.value(option);
  for (const auto& [name, value] : values)
    if (given == name) return value;
  return values.begin()->second;
}

data::RecordOptions record_options(const Arguments& args) {
  using data::InputFormat;
  using data::TextSplit;
  data::RecordOptions records;
  records.format = choice<InputFormat>(
      args, "format",
      {{"auto", InputFormat::automatic}, {"json", InputFormat::json}, {"text", InputFormat::text}});
  records.split = choice<TextSplit>(args, "documents",
                                    {{"auto", TextSplit::automatic},
                                     {"blank-line", TextSplit::blank_line},
                                     {"separator", TextSplit::separator},
                                     {"file", TextSplit::file}});
  if (const auto separator = args.value("separator")) {
    if (records.split != TextSplit::automatic && records.split != TextSplit::separator)
      fail(ErrorCode::usage,
           "--separator and --documents " + *args.value("documents") + " exclude each other");
    if (separator->find('\n') != std::string::npos || trim(*separator).empty())
      fail(ErrorCode::usage, "the separator must be one line that is not blank");
    records.split = TextSplit::separator;
    records.separator = *separator;
  }
  return records;
}

int32_t end_of_document(const Arguments& args, const NamedTokenizer& tokenizer) {
  if (const auto token = args.value("eod")) {
    if (const auto id = tokenizer.tokenizer->id_of(*token)) return *id;
    fail(ErrorCode::usage, "the tokenizer `" + tokenizer.name + "` has no token `" + *token + "`");
  }
  if (const auto id = tokenizer.tokenizer->eod()) return *id;
  fail(ErrorCode::usage, "the tokenizer `" + tokenizer.name + "` names no end-of-document token",
       "name one with --eod TOKEN, or leave --append-eod out");
}

int run_data_prepare(Context& context) {
  const Arguments& args = context.args;
  data::PrepareOptions options;
  options.inputs = args.words();
  if (options.inputs.empty())
    fail(ErrorCode::usage, "FILE is missing", "name the files or directories to read");
  options.output_prefix = args.required("output");
  options.records = record_options(args);
  options.overwrite = args.has("overwrite");
  if (const auto keys = args.value("json-keys")) {
    options.json_keys.clear();
    for (const std::string_view key : split(*keys, ',')) options.json_keys.emplace_back(key);
  }
  // PREFIX_KEY_document, the name of a dataset in recipes, stands for PREFIX.
  for (const std::string& key : options.json_keys)
    if (const std::string suffix = "_" + key + "_document"; options.output_prefix.ends_with(suffix))
      options.output_prefix.resize(options.output_prefix.size() - suffix.size());
  options.on_bad_line = choice<data::OnBadLine>(
      args, "on-bad-line", {{"fail", data::OnBadLine::fail}, {"skip", data::OnBadLine::skip}});
  options.append_eod = args.has("append-eod");
  if (args.has("eod") && !options.append_eod)
    fail(ErrorCode::usage, "--eod has no effect without --append-eod");
  const NamedTokenizer tokenizer = tokenizer_argument(context);
  if (options.append_eod) options.eod = end_of_document(args, tokenizer);
  ThreadPool pool(static_cast<int>(args.integer("workers", 0, 1024).value_or(0)));

  Progress progress(!context.quiet(), context.color_err);
  progress.plain_status_every(std::chrono::seconds(10));
  progress.line("reading " + counted(options.inputs.size(), "input"));
  options.progress = [&](const data::PrepareProgress& now) { progress.status(data::to_text(now)); };
  const data::PrepareResult result = data::prepare(options, *tokenizer.tokenizer, tokenizer.name, pool);
  for (const std::string& bad : result.reports) progress.warning("skipped: " + bad);
  report_html_pages(progress, result.html_pages);
  put(args.has("json") ? data::to_json(result) + "\n" : data::to_text(result));
  return 0;
}

void refuse(const Arguments& args, std::initializer_list<const char*> options, const std::string& why,
            const std::string& help = {}) {
  for (const char* option : options)
    if (args.has(option)) fail(ErrorCode::usage, std::string("`--") + option + "` " + why, help);
}

void put_report(const Context& context, const data::SftReport& report) {
  put(context.args.has("json") ? data::to_json_report(report) + "\n"
                               : data::to_text_report(report, context.color_out));
}

// Inspects the fine-tuning data of a recipe, or of a file read with the settings of the recipe.
int inspect_recipe(Context& context, const std::string& recipe, const std::optional<std::string>& file) {
  const Arguments& args = context.args;
  refuse(args, {"tokenizer", "chat-template", "format", "loss-mode", "seq-length"},
         "is set by the recipe `" + recipe + "`",
         "override it: tokenizer.tokenizer_model=FILE, tokenizer.chat_template=, dataset.format=, "
         "dataset.loss_mode=, model.seq_length=");
  config::Request request;
  request.recipe = recipe;
  if (file)
    for (const std::string& text :
         {std::string("dataset=sft"), "dataset.train_files=[" + in_quotes(*file) + "]"})
      request.overrides.push_back(config::Override::token(text));
  request.overrides.insert(request.overrides.end(), args.overrides().begin(), args.overrides().end());
  const config::Resolution resolution = config::resolve(request);
  show_diagnostics(context, resolution);
  if (!resolution.ok()) throw CommandExit{exit_code_of(ErrorCode::config)};
  const config::DatasetConfig& dataset = resolution.config.dataset;
  if (dataset.kind != config::DatasetKind::sft) {
    std::string prefixes;
    if (dataset.kind == config::DatasetKind::gpt) {
      const auto sources = config::data_sources(dataset);
      for (const auto& source : sources.splits[0]) prefixes += " " + source.prefix;
    }
    fail(ErrorCode::usage, "the dataset of `" + recipe + "` is not fine-tuning data",
         prefixes.empty() ? "it is generated; name a prefix or a file"
                          : "inspect the dataset itself: capstan data inspect" + prefixes);
  }
  const auto tokenizer = train::load_tokenizer(resolution.config);
  data::SftOptions options = train::sft_options(resolution.config, *tokenizer);
  if (file) {
    options.valid_files.clear(), options.test_files.clear();
    options.split = "1,0,0";
  }
  options.on_bad_line = data::OnBadLine::skip;
  const auto report = data::inspect_sft(*data::build_sft_datasets(options)[0], *tokenizer,
                                        args.integer("samples", 0, 1'000'000).value_or(3),
                                        args.integer("sample-tokens", 0, 1'000'000).value_or(512));
  put_report(context, report);
  return 0;
}

void refuse_overrides(const Arguments& args, const std::string& way) {
  if (args.overrides().empty()) return;
  const std::string& text = args.overrides().front().text;
  fail(ErrorCode::usage, "the override `" + text + "` changes a recipe, and none is given", way + text);
}

int inspect_samples(Context& context, const std::string& file) {
  const Arguments& args = context.args;
  refuse(args, {"scan"}, "applies to a PREFIX, and `" + file + "` is a file of samples");
  if (const auto recipe = args.value("recipe")) return inspect_recipe(context, *recipe, file);
  refuse_overrides(args,
                   "the options --tokenizer, --chat-template, --format, --loss-mode and --seq-length, or "
                   "capstan data inspect " +
                       file + " --recipe RECIPE ");
  using data::SftFormat;
  using data::SftLoss;
  const auto tokenizer = tokenizer_argument(context).tokenizer;
  data::SftOptions options;
  options.train_files = {file};
  options.split = "1,0,0";
  options.format = choice<SftFormat>(args, "format",
                                     {{"auto", SftFormat::automatic},
                                      {"messages", SftFormat::messages},
                                      {"sharegpt", SftFormat::sharegpt},
                                      {"alpaca", SftFormat::alpaca},
                                      {"prompt_completion", SftFormat::prompt_completion},
                                      {"text", SftFormat::text}});
  options.loss = choice<SftLoss>(
      args, "loss-mode",
      {{"assistant", SftLoss::assistant}, {"last_turn", SftLoss::last_turn}, {"all", SftLoss::all}});
  options.sequence_length = args.integer("seq-length", 1, 1 << 24).value_or(2048);
  options.on_bad_line = data::OnBadLine::skip;
  options.tokenizer = tokenizer.get();
  options.eod = tokenizer->eod();
  if (const auto name = args.value("chat-template"); name && !name->empty())
    options.chat_template = text::chat::ChatTemplate::load(*name);
  try {
    put_report(context, data::inspect_sft(*data::build_sft_datasets(options)[0], *tokenizer,
                                          args.integer("samples", 0, 1'000'000).value_or(3),
                                          args.integer("sample-tokens", 0, 1'000'000).value_or(512)));
  } catch (const Error& error) {
    constexpr std::string_view kField = "tokenizer.chat_template=";
    if (!error.marked_help().starts_with(kField)) throw;
    // Without a recipe, the option has the place of the field in the message.
    Error with_option(error.code(), error.message(),
                      "--chat-template " + error.marked_help().substr(kField.size()));
    for (const std::string& context_line : error.context()) with_option.in(context_line);
    throw with_option;
  }
  return 0;
}

bool names_samples(std::string name) {
  for (const char* packed : {".gz", ".zst"})
    if (name.ends_with(packed)) name.resize(name.rfind('.'));
  return name.ends_with(".jsonl") || name.ends_with(".ndjson") || name.ends_with(".json");
}
bool names_recipe(const std::string& name) {
  std::error_code ignored;
  if (name.ends_with(".yaml") || name.ends_with(".yml")) return true;
  for (const char* ending : {"", ".idx", "_text_document.idx"})
    if (std::filesystem::exists(name + ending, ignored)) return false;
  return config::Library::standard().recipe(name).has_value();
}

int run_data_inspect(Context& context) {
  const Arguments& args = context.args;
  const std::string& what = args.word(0, "PREFIX, FILE.jsonl or RECIPE");
  if (names_samples(what)) return inspect_samples(context, what);
  refuse(args, {"recipe", "chat-template", "format", "loss-mode", "seq-length"},
         "applies to a FILE.jsonl, and `" + what + "` is not one");
  if (names_recipe(what)) {
    refuse(args, {"scan"}, "applies to a PREFIX, and `" + what + "` is a recipe");
    return inspect_recipe(context, what, std::nullopt);
  }
  refuse_overrides(args, "capstan data inspect RECIPE ");
  data::InspectOptions options;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  if (const auto name = args.value("tokenizer")) {
    tokenizer = train::load_tokenizer_files(*name);
    options.tokenizer = tokenizer.get();
    options.tokenizer_name = *name;
  }
  options.samples = args.integer("samples", 0, 1'000'000).value_or(3);
  options.sample_tokens = args.integer("sample-tokens", 0, 1'000'000).value_or(32);
  options.scan_tokens = args.has("scan");
  const data::DatasetReport report = data::inspect(what, options);
  put(args.has("json") ? data::to_json_report(report) + "\n" : data::to_text_report(report));
  return 0;
}

}  // namespace

const Command kDataPrepare = {
    .name = "data prepare",
    .purpose = "convert text or JSON files to an indexed dataset (.bin, .idx)",
    .usage = "FILE… --tokenizer tokenizer.json --output PREFIX [flags]",
    .examples = {{"data prepare corpus.jsonl.gz --tokenizer tokenizer.json --append-eod --output data/corpus",
                  "JSON lines"},
                 {"data prepare books/ --tokenizer bytes --output data/books",
                  "a tree of text files, a document each"},
                 {"data prepare quotes.txt --separator % --tokenizer t.json --output data/quotes",
                  "documents between lines of `%`"},
                 {"data prepare *.txt -r quickstart --output data/mine",
                  "with the tokenizer that a recipe names"}},
    .options =
        {{"output", 'o', "PREFIX", "write PREFIX_text_document.bin and .idx (one pair for each JSON key)"},
         {"tokenizer", 't', "FILE", "tokenizer.json, a directory with one, or `bytes`"},
         {"recipe", 'r', "RECIPE", "use the tokenizer of a recipe; overrides apply to the recipe"},
         {"append-eod", 0, "", "append an end-of-document token to each document"},
         {"eod", 0, "TOKEN", "the end-of-document token; default: the tokenizer's own, <|endoftext|>"},
         {"json-keys", 0, "K,…", "keys whose values are converted, of each JSON object; default: text"},
         {"format", 0, "FORMAT", "input format: auto (by name), json or text", "", "auto json text"},
         {"documents", 0, "HOW", "end of a document of plain text: auto, blank-line, separator or file", "",
          "auto blank-line separator file"},
         {"separator", 0, "LINE", "line that separates documents (implies --documents separator)"},
         {"on-bad-line", 0, "WHAT", "at a malformed line: fail (default), or skip and count it", "",
          "fail skip"},
         {"overwrite", 0, "", "replace datasets of that name"},
         {"workers", 0, "N", "number of threads; default: the cores of this process"},
         {"json", 0, "", "print the result as one JSON object"}},
    .details =
        "Reads .gz and .zst files too. The bytes written depend on the input, the tokenizer and the options, "
        "not on the\n"
        "number of threads, and equal those of Megatron's preprocess_data.py. PREFIX_text_document.meta.json "
        "records the\n"
        "tokenizer: `train` and `data inspect` refuse another one. The output files appear when all of them "
        "are complete.\n",
    .overrides = true,
    .max_words = SIZE_MAX,
    .run = run_data_prepare,
};

const Command kDataInspect = {
    .name = "data inspect",
    .purpose = "inspect a dataset; for fine-tuning data, show which tokens have loss",
    .usage = "PREFIX|FILE.jsonl|RECIPE [--tokenizer tokenizer.json] [flags]",
    .examples = {{"data inspect data/corpus_text_document",
                  "sizes, document lengths, a few documents as ids"},
                 {"data inspect data/corpus_text_document -t tokenizer.json", "the same documents as text"},
                 {"data inspect chats.jsonl -t tokenizer.json --chat-template chatml",
                  "tokens and loss mask of conversations"},
                 {"data inspect chats.yaml", "the packed rows of a recipe's fine-tuning data"}},
    .options =
        {{"tokenizer", 't', "FILE", "show the samples as text; FILE.jsonl: required, or a recipe"},
         {"recipe", 'r', "RECIPE", "FILE.jsonl: read it as this recipe does; overrides apply to the recipe"},
         {"chat-template", 0, "NAME", "FILE.jsonl: a known template or a file; default: the tokenizer's own"},
         {"format", 0, "FORMAT", "FILE.jsonl: format of its samples; default auto (by its keys)", "",
          "auto messages sharegpt alpaca prompt_completion text"},
         {"loss-mode", 0, "MODE", "FILE.jsonl: which tokens have loss; default assistant", "",
          "assistant last_turn all"},
         {"seq-length", 0, "N", "FILE.jsonl: tokens of a row; default 2048"},
         {"samples", 0, "N",
          "number of documents or rows to show, evenly spaced over the dataset; default 3"},
         {"sample-tokens", 0, "N", "number of tokens to show of each; default 32, for fine-tuning data 512"},
         {"scan", 0, "", "PREFIX: read every token and report the largest id"},
         {"json", 0, "", "print one JSON object"}},
    .details =
        "In fine-tuning data, tokens with loss are green, or without colors between ⟦ and ⟧. Lines that are "
        "not\n"
        "samples are counted and reported.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_data_inspect,
};

}  // namespace capstan::cli

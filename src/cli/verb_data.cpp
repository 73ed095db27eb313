// capstan data prepare | inspect
#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "data/verbs.hpp"

namespace capstan::cli {

namespace {

int run_data_prepare(Context& context) {
  const Arguments& args = context.args;
  data::PrepareVerb verb;
  verb.inputs = args.words();
  if (verb.inputs.empty()) fail(ErrorCode::usage, "FILE is missing", "name the files or directories to read");
  verb.tokenizer = tokenizer_argument(context);
  verb.output = args.required("output");
  if (const auto keys = args.value("json-keys")) {
    verb.json_keys.clear();
    for (const std::string_view key : split(*keys, ',')) verb.json_keys.emplace_back(key);
  }
  verb.append_eod = args.has("append-eod");
  verb.eod = args.value("eod");
  verb.format = args.value("format").value_or("auto");
  verb.documents = args.value("documents").value_or("auto");
  verb.separator = args.value("separator");
  verb.on_bad_line = args.value("on-bad-line").value_or("fail");
  verb.workers = static_cast<int>(args.integer("workers", 0, 1024).value_or(0));

  Progress progress(!context.quiet(), context.color_err);
  progress.plain_status_every(std::chrono::seconds(10));
  progress.line("reading " + std::to_string(verb.inputs.size()) +
                (verb.inputs.size() == 1 ? " input" : " inputs"));
  verb.progress = [&](const data::PrepareProgress& now) { progress.status(data::to_text(now)); };
  const data::PrepareResult result = data::run_prepare(verb);
  for (const std::string& bad : result.reports) progress.warning("skipped: " + bad);
  put(args.has("json") ? data::to_json(result) + "\n" : data::to_text(result));
  return 0;
}

int run_data_inspect(Context& context) {
  const Arguments& args = context.args;
  data::InspectVerb verb;
  verb.prefix = args.word(0, "PREFIX");
  verb.tokenizer = args.value("tokenizer");
  verb.samples = args.integer("samples", 0, 1'000'000).value_or(3);
  verb.sample_tokens = args.integer("sample-tokens", 0, 1'000'000).value_or(32);
  verb.scan_tokens = args.has("scan");
  const data::DatasetReport report = data::run_inspect(verb);
  put(args.has("json") ? data::to_json_report(report) + "\n" : data::to_text_report(report));
  return 0;
}

}  // namespace

const Verb kDataPrepare = {
    .name = "data prepare",
    .purpose = "text or JSON files to an indexed dataset (.bin, .idx)",
    .usage = "FILE… --tokenizer tokenizer.json --output PREFIX [flags]",
    .examples =
        {{"data prepare corpus.jsonl.zst --tokenizer tokenizer.json --append-eod --output data/corpus",
          "JSON lines"},
         {"data prepare books/ --tokenizer bytes --output data/books",
          "a tree of text files, a document each"},
         {"data prepare quotes.txt --separator % --tokenizer t.json --output data/quotes",
          "documents between lines of `%`"},
         {"data prepare *.txt -r quickstart --output data/mine", "with the tokenizer that a recipe names"}},
    .options =
        {{"output", 'o', "PREFIX", "writes PREFIX_text_document.bin and .idx (one pair for each JSON key)"},
         {"tokenizer", 't', "FILE", "tokenizer.json, a directory with one, or `bytes`"},
         {"recipe", 'r', "RECIPE", "take the tokenizer of a recipe instead; overrides apply to it"},
         {"append-eod", 0, "", "an end-of-document token after each document"},
         {"eod", 0, "TOKEN", "which one; default: the tokenizer's own, <|endoftext|>"},
         {"json-keys", 0, "K,…", "what to take from each JSON object; default: text"},
         {"format", 0, "FORMAT", "auto (by name), json or text", "", "auto json text"},
         {"documents", 0, "HOW", "what ends a document of plain text: auto, blank-line, separator or file",
          "", "auto blank-line separator file"},
         {"separator", 0, "LINE", "documents are separated by this line (implies --documents separator)"},
         {"on-bad-line", 0, "WHAT", "fail (default) or skip, and count", "", "fail skip"},
         {"workers", 0, "N", "threads; default: the cores of this process"},
         {"json", 0, "", "the result as one JSON object"}},
    .details =
        "Files ending in .gz or .zst are decompressed on the way. The bytes written depend on the input, "
        "the\n"
        "tokenizer and the options, not on the number of threads; they are what Megatron's "
        "preprocess_data.py\n"
        "writes. Nothing appears under the output names unless all went well.\n",
    .overrides = true,
    .max_words = SIZE_MAX,
    .run = run_data_prepare,
};

const Verb kDataInspect = {
    .name = "data inspect",
    .purpose = "what an indexed dataset holds",
    .usage = "PREFIX [--tokenizer tokenizer.json] [flags]",
    .examples = {{"data inspect data/corpus_text_document",
                  "sizes, document lengths, a few documents as ids"},
                 {"data inspect data/corpus_text_document -t tokenizer.json", "the same documents as text"}},
    .options = {{"tokenizer", 't', "FILE", "show the samples as text"},
                {"samples", 0, "N", "documents to show, spread over the dataset; default 3"},
                {"sample-tokens", 0, "N", "tokens of each; default 32"},
                {"scan", 0, "", "read every token and tell the largest"},
                {"json", 0, "", "as one JSON object"}},
    .max_words = 1,
    .run = run_data_inspect,
};

}  // namespace capstan::cli

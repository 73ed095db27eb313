// capstan eval
#include <filesystem>
#include <iostream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/stored_model.hpp"
#include "cli/terminal.hpp"
#include "train/inference/evaluate.hpp"

namespace capstan::cli {

namespace {

// Standard input to its end: a pipe has no size.
std::string standard_input() {
  std::string text, part(1 << 16, '\0');
  while (std::cin.read(part.data(), static_cast<std::streamsize>(part.size())) || std::cin.gcount() > 0)
    text.append(part, 0, static_cast<size_t>(std::cin.gcount()));
  return text;
}

int run_eval(Context& context) {
  const Arguments& args = context.args;
  const std::string& name = args.word(0, "CHECKPOINT");
  const std::string file = args.required("text");
  if (file == "-" && serving_ranks(context) > 1)
    fail(ErrorCode::usage, "a text from standard input reaches only one rank",
         "write it to a file and name that");
  train::EvalOptions options;
  std::error_code unknown;
  if (file != "-" && !std::filesystem::exists(file, unknown))
    fail_not_found("text file", file, "name a file of UTF-8 text, or `-` for standard input");
  options.text = file == "-" ? standard_input() : read_file(file);
  refuse_lfs_pointer(options.text, file);
  options.stride = args.integer("stride", 1).value_or(0);
  options.add_front = !args.has("no-bos");
  const bool per_token = args.has("per-token");
  return run_stored_model(context, name, [&](train::LoadedModel& model, bool is_rank0) {
    if (is_rank0) {
      HtmlPages pages;
      pages.look(options.text, file);
      Progress progress(!context.quiet(), context.color_err);
      report_html_pages(progress, pages);
    }
    if (per_token && is_rank0)
      options.per_token = [](int32_t id, double logprob) {
        put(dump_json(OrderedJson{{"id", id}, {"logprob", logprob}}) + "\n");
      };
    const train::EvalResult result = train::evaluate_text(model, options);
    if (!is_rank0) return 0;
    if (args.has("json") && !per_token) {
      const OrderedJson object = {{"schema", "capstan.eval/1"},
                                  {"loss", result.loss},
                                  {"perplexity", result.perplexity},
                                  {"tokens", result.tokens},
                                  {"bits_per_byte", result.bits_per_byte}};
      put(dump_json(object) + "\n");
      return 0;
    }
    const std::string line = "loss " + fixed(result.loss, 4) + " | perplexity " +
                             fixed(result.perplexity, 2) + " | " + fixed(result.bits_per_byte, 4) +
                             " bits/byte | " + with_separators(result.tokens) + " tokens\n";
    if (per_token) {
      if (!context.quiet()) print_stderr(line);
    } else {
      put(line);
    }
    return 0;
  });
}

}  // namespace

const Command kEval = {
    .name = "eval",
    .purpose = "compute loss and perplexity of a checkpoint on a text",
    .usage = "CHECKPOINT|RUN|hf:DIR|gguf:FILE --text FILE [flags]",
    .examples = {{"eval runs/quickstart --text heldout.txt", "loss, perplexity, bits per byte"},
                 {"eval hf:SmolLM2-135M --text heldout.txt", "a Hugging Face model; likewise gguf:FILE"},
                 {"eval hf:SmolLM2-135M --adapter my-lora --text heldout.txt", "with a PEFT adapter"},
                 {"eval runs/quickstart --text heldout.txt --per-token",
                  "one {\"id\":…,\"logprob\":…} for each token"}},
    .options = {{"text", 0, "FILE", "UTF-8 text to evaluate; `-` is standard input"},
                kAdapter,
                {"per-token", 0, "",
                 "print one JSON line for each predicted token, with its natural log-probability"},
                {"stride", 0, "N", "stride of the sliding window in tokens; default: the sequence length"},
                kNoBos,
                {"json", 0, "", "print the result as one JSON object"},
                kServingRanks},
    .details = kServingLayout,
    .overrides = true,
    .max_words = 1,
    .run = run_eval,
};

}  // namespace capstan::cli

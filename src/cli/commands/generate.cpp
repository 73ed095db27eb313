// capstan generate
#include <utility>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/stored_model.hpp"
#include "cli/terminal.hpp"
#include "train/inference/generate.hpp"

namespace capstan::cli {

namespace {

int run_generate(Context& context) {
  const Arguments& args = context.args;
  const std::string& name = args.word(0, "CHECKPOINT");
  train::GenerateOptions options;
  options.prompt = args.value("prompt").value_or("");
  options.chat = args.has("chat");
  options.system = args.value("system").value_or("");
  options.add_front = !args.has("no-bos");
  if (options.chat && !args.value("prompt"))
    fail(ErrorCode::usage, "`--chat` without a message", "--chat --prompt TEXT");
  if (!options.chat && args.has("system"))
    fail(ErrorCode::usage, "`--system` applies to chats", "--chat --system TEXT --prompt TEXT");
  if (options.chat && args.has("no-bos"))
    fail(ErrorCode::usage, "`--no-bos` does not apply to chats: the chat template adds the first tokens");
  options.max_tokens = args.integer("max-tokens", 1).value_or(100);
  options.temperature = args.number("temperature", 0, 1000).value_or(1.0);
  options.top_k = args.integer("top-k", 0).value_or(0);
  options.top_p = args.number("top-p", 0, 1, true).value_or(1.0);
  options.seed = static_cast<uint64_t>(args.integer("seed", 0).value_or(1234));
  options.stop_at_eod = !args.has("ignore-eod");
  const bool json = args.has("json");

  return run_stored_model(context, name, [&](train::LoadedModel& model, bool is_rank0) {
    // Takes part in the computation without output.
    if (!is_rank0) {
      train::generate(model, options);
      return 0;
    }
    std::string text;
    bool echoes = !json && !options.chat && !args.has("no-echo");
    // The prompt is printed with the first token, so that a refused request prints nothing.
    const auto echo = [&] {
      if (std::exchange(echoes, false)) put(options.prompt);
    };
    options.on_text = [&](const std::string& token_text) {
      if (json) {
        text += token_text;
        return;
      }
      echo();
      put(token_text);
      flush_output();
    };
    const train::GenerateResult result = train::generate(model, options);
    const auto note_full = [&] {
      if (result.context_full && !context.quiet())
        print_stderr("note: the context is full: prompt and answer have the " +
                     std::to_string(result.context_limit) + " tokens of " + result.context_field + ", " +
                     std::to_string(options.max_tokens - result.tokens) +
                     " fewer than --max-tokens asks for\n");
    };
    if (json) {
      const OrderedJson object = {
          {"schema", "capstan.generate/1"},        {"prompt", options.prompt}, {"text", text},
          {"prompt_tokens", result.prompt_tokens}, {"tokens", result.tokens},  {"ended", result.ended},
          {"context_full", result.context_full},   {"seconds", result.seconds}};
      put(dump_json(object) + "\n");
      note_full();
      return 0;
    }
    echo();
    put("\n");
    finish_output();
    note_full();
    if (context.verbosity > 0 && result.seconds > 0)
      print_stderr(std::to_string(result.tokens) + " tokens, " +
                   human_count(static_cast<double>(result.tokens) / result.seconds) + " tokens/s\n");
    return 0;
  });
}

}  // namespace

const Command kGenerate = {
    .name = "generate",
    .purpose = "generate text with a checkpoint",
    .usage = "CHECKPOINT|RUN|hf:DIR|gguf:FILE --prompt TEXT [flags]",
    .examples = {{"generate runs/quickstart --prompt \"The best way to\"", "from its newest checkpoint"},
                 {"generate runs/quickstart --prompt \"Q:\" --temperature 0.7 --top-p 0.9 --max-tokens 60",
                  ""},
                 {"generate runs/smollm2-135m-lora --chat --prompt \"Why is the sky blue?\"",
                  "an answer, by the chat template"},
                 {"generate hf:SmolLM2-135M --prompt \"To be\"", "a Hugging Face model; likewise gguf:FILE"},
                 {"generate hf:SmolLM2-135M --adapter my-lora --prompt \"To be\"", "with a PEFT adapter"},
                 {"generate runs/quickstart --prompt \"To be\" --temperature 0", "greedy decoding"}},
    .options = {{"prompt", 'p', "TEXT", "text to continue; default: begin a document"},
                {"chat", 0, "", "apply the chat template to the prompt; print the answer only"},
                {"system", 0, "TEXT", "with --chat: the system message"},
                kAdapter,
                {"max-tokens", 0, "N", "maximum number of new tokens; default 100"},
                {"temperature", 0, "T", "sampling temperature; 0: greedy decoding; default 1"},
                {"top-k", 0, "K", "sample from the K most probable tokens; 0 (default): all"},
                {"top-p", 0, "P", "nucleus sampling with probability mass P; default 1"},
                {"seed", 0, "S", "random seed; default 1234"},
                {"ignore-eod", 0, "", "continue after the end of a document or answer"},
                kNoBos,
                {"no-echo", 0, "", "do not print the prompt"},
                {"json", 0, "", "print one JSON object at the end"},
                kServingRanks},
    .details = kServingLayout,
    .overrides = true,
    .max_words = 1,
    .run = run_generate,
};

}  // namespace capstan::cli

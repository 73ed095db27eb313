// capstan help
#include "cli/help.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"

namespace capstan::cli {

namespace {
int run_help(Context& context) {
  put(help_on(context.args.words()));
  return 0;
}
}  // namespace

const Verb kHelp = {
    .name = "help",
    .purpose = "help on a verb or a topic",
    .usage = "[VERB | TOPIC]",
    .examples = {{"help train", "all flags of a verb"},
                 {"help overrides", "how fields are changed on the command line"},
                 {"help", "verbs and topics"}},
    .max_words = 2,
    .run = run_help,
};

}  // namespace capstan::cli

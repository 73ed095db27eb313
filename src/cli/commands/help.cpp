// capstan help
#include <filesystem>

#include "base/file.hpp"
#include "cli/commands/commands.hpp"
#include "cli/help.hpp"
#include "cli/man.hpp"
#include "cli/terminal.hpp"

namespace capstan::cli {

namespace {
int run_help(Context& context) {
  const auto directory = context.args.value("man");
  if (!directory) {
    put(help_on(context.args.words()));
    return 0;
  }
  const auto pages = man_pages();
  for (const auto& [name, text] : pages) {
    const std::filesystem::path file = std::filesystem::path(*directory) / name;
    std::filesystem::create_directories(file.parent_path());
    write_file_durably(file, text);
  }
  if (!context.quiet()) put(*directory + ": " + std::to_string(pages.size()) + " manual pages\n");
  return 0;
}
}  // namespace

const Command kHelp = {
    .name = "help",
    .purpose = "print help on a command or a topic",
    .usage = "[COMMAND | TOPIC] [--man DIR]",
    .examples = {{"help train", "all flags of a command"},
                 {"help overrides", "how fields are changed on the command line"},
                 {"help", "commands and topics"}},
    .options = {{"man", 0, "DIR",
                 "write the manual pages: man1/capstan.1, one for each command, man5/capstan-recipe.5"}},
    .max_words = 2,
    .run = run_help,
};

}  // namespace capstan::cli

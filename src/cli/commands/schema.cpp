// capstan schema
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "cli/commands/commands.hpp"
#include "cli/help.hpp"
#include "cli/terminal.hpp"
#include "config/tools/json_schema.hpp"
#include "config/tools/reference.hpp"

namespace capstan::cli {

namespace {

int run_schema(Context& context) {
  const Arguments& args = context.args;
  const config::Schema& schema = config::schema();
  // Uses the shipped recipes and presets only, so that the schemas do not depend on the working directory.
  const config::Library library(config::library_files(), {});
  if (!args.words().empty() && (args.has("write") || args.has("docs")))
    fail(ErrorCode::usage, "--write and --docs write the files of all sections",
         "leave `" + args.words()[0] + "` out");
  if (const auto directory = args.value("write")) {
    std::filesystem::create_directories(*directory);
    const auto files = config::schema_files(schema, library);
    for (const auto& [name, text] : files) write_file_durably(std::filesystem::path(*directory) / name, text);
    put(*directory + ": " + std::to_string(files.size()) + " schemas\n");
    return 0;
  }
  if (const auto directory = args.value("docs")) {
    const auto pages = config::reference_pages(schema, library, file_pages());
    std::filesystem::create_directories(*directory);
    for (const auto& [name, text] : pages) write_file_durably(std::filesystem::path(*directory) / name, text);
    put(*directory + ": " + std::to_string(pages.size()) + " pages\n");
    return 0;
  }
  if (args.words().empty()) {
    put(config::recipe_json_schema(schema, library));
    return 0;
  }
  const std::string& name = args.words()[0];
  const config::SectionInfo* section = schema.find_section(name);
  if (!section || name.empty()) {
    std::vector<std::string> names;
    for (const auto& info : schema.sections())
      if (!info.name.empty()) names.push_back(info.name);
    fail(ErrorCode::usage, "there is no section `" + name + "`", choices_help(name, names));
  }
  put(config::section_json_schema(schema, *section));
  return 0;
}

}  // namespace

const Command kSchema = {
    .name = "schema",
    .purpose = "print the JSON Schema of recipes, for editors",
    .usage = "[SECTION] [--write DIR | --docs DIR]",
    .examples = {{"schema > recipe.schema.json", "of a recipe"},
                 {"schema optimizer", "of a section or a preset file"},
                 {"schema --write schemas", "all of them, as files"}},
    .options = {{"write", 0, "DIR", "write recipe.schema.json and one for each section"},
                {"docs", 0, "DIR",
                 "write the reference in Markdown: a page for each section, rules, recipes, cluster files"}},
    .details =
        "An editor finds it by the comment `# yaml-language-server: $schema=PATH/recipe.schema.json` at the "
        "top of a recipe.\n",
    .max_words = 1,
    .run = run_schema,
};

}  // namespace capstan::cli

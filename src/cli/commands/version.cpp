// capstan version

#include "base/commit.hpp"
#include "base/json.hpp"
#include "cli/commands/commands.hpp"
#include "cli/terminal.hpp"

namespace capstan::cli {

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

int run_version(Context& context) {
  if (!context.args.has("json")) {
    put("capstan " CAPSTAN_VERSION "\n");
    if (context.verbosity > 0 || context.args.has("full"))
      put(std::string("commit    ") + program_commit() + "\nbuild     " CAPSTAN_BUILD_TYPE ", " + kCompiler +
          "\ndevices   cpu\n");
    return 0;
  }
  const OrderedJson object = {{"schema", "capstan.version/1"}, {"version", CAPSTAN_VERSION},
                              {"commit", program_commit()},    {"build", CAPSTAN_BUILD_TYPE},
                              {"compiler", kCompiler},         {"devices", {"cpu"}}};
  put(dump_json(object, 2) + "\n");
  return 0;
}

}  // namespace

const Command kVersion = {
    .name = "version",
    .purpose = "print the version of this program",
    .usage = "[--full | --json]",
    .examples = {{"version", ""}, {"version --json", "with commit, build type and compiler"}},
    .options = {{"full", 0, "", "print commit, build type, compiler and devices too"},
                {"json", 0, "", "print one JSON object"}},
    .run = run_version,
};

}  // namespace capstan::cli

#include "cli/stored_model.hpp"

#include "base/error.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "train/recipe.hpp"

namespace capstan::cli {

std::shared_ptr<train::LoadedModel> load_stored_model(const Context& context, const std::string& name) {
  const train::StoredRecipe stored = train::stored_recipe(name, context.args.overrides());
  for (const std::string& reason : stored.refused)
    say("warning: not taken: " + reason + "\nwarning: taken instead: `" + stored.checkpoint.string() + "`\n");
  if (context.verbosity > 0) say("checkpoint " + stored.checkpoint.string() + "\n");
  // Its warnings were shown when the run began.
  if (!stored.resolution.ok()) {
    show_diagnostics(context, stored.resolution);
    throw Exit{exit_code_of(ErrorCode::config)};
  }
  return train::load_model(stored.checkpoint, stored.resolution.config);
}

}  // namespace capstan::cli

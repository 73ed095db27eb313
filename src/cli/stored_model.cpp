#include "cli/stored_model.hpp"

#include "base/error.hpp"
#include "checkpoint/store.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"

namespace capstan::cli {

std::shared_ptr<train::LoadedModel> load_stored_model(const Context& context, const std::string& name) {
  for (const char* const scheme : {"hf:", "gguf:"})
    if (name.starts_with(scheme))
      fail(ErrorCode::unsupported, "`" + name + "`: this version reads its own checkpoints only",
           "name a run or a checkpoint directory");
  const checkpoint::Checkpoint checkpoint = checkpoint::resolve_checkpoint(name);
  if (context.verbosity > 0) say("checkpoint " + checkpoint.path.string() + "\n");
  const std::filesystem::path recipe = checkpoint.path / std::string(checkpoint::kRecipeFile);
  // Its warnings were shown when the run began.
  const config::Resolution resolution = resolve_recipe(context, recipe.string());
  if (!resolution.ok()) {
    show_diagnostics(context, resolution);
    throw Exit{exit_code_of(ErrorCode::config)};
  }
  return train::load_model(checkpoint.path, resolution.config);
}

}  // namespace capstan::cli

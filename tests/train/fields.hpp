// A proof for every field of the schema that it is not ignored.
#pragma once

#include <string>
#include <vector>

namespace capstan::testing {

using Overrides = std::vector<std::string>;

// The result that is computed from two recipes and compared.
enum class View {
  // Losses, gradient norms, learning rates, skips and events of five steps, validation loss; device, threads,
  // number of CUDA graphs.
  run,
  // Names, shapes and distribution of the initial values of the parameters.
  model,
  // The rank grid, stages, pipeline shape, store options, tensor-parallel splits.
  wiring,
  // Memory held and bytes sent in a step, of the first and the last rank.
  memory,
  // The three datasets: number and contents of rows, with masks, and the way they are read.
  data,
  // Ids of a text, the end of a document, a conversation.
  tokens,
  // A run from its start: outcome, files, lines, rows of the metrics; while it runs: the action of SIGTERM.
  files,
  // Four steps by the plain recipe, continued by this one: learning rates, or the refusal.
  resume,
  // The recipe as shown, for fields that are only a text about the recipe.
  shown,
};

struct Proof {
  enum class Kind {
    // `base`, and `base` with the value (and `when`, read only beside it), differ in `view`.
    changes,
    // train refuses the value and names this field.
    refused,
    // C0604 or C0606 on this field; with `when` it is read, and train refuses a field of `when` by name.
    idle,
    // The rule `rule` has an error on the value.
    ruled,
    // The rule `rule` warns of the value, which changes nothing.
    warned,
    // Without the value the rule `rule` refuses the recipe.
    allows,
    // Read outside the trainer; a test case of the file `rule` that begins with `value` compares two runs.
    elsewhere,
  };
  Kind kind;
  std::string field, value;
  Overrides base;
  View view = View::run;
  std::string rule;
  Overrides when;
};

const std::vector<Proof>& proofs();

}  // namespace capstan::testing

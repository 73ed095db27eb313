// A proof for every field of the schema that it is not ignored.
#pragma once

#include <string>
#include <vector>

namespace capstan::testing {

using Overrides = std::vector<std::string>;

// The result that is computed from two recipes and compared.
enum class View {
  // losses, gradient norms, learning rates, skips and events of five steps, validation loss; device, threads
  run,
  model,   // names, shapes and distribution of the initial values of the parameters
  wiring,  // the rank grid, stages, pipeline shape, store options, tensor-parallel splits
  memory,  // what a step holds and sends, of the first and the last rank
  data,    // the three datasets: how many rows, which, with masks; how they are read
  tokens,  // ids of a text, the end of a document, a conversation
  // a run from its start: outcome, files, lines, rows of the metrics; while it runs: the action of SIGTERM
  files,
  resume,  // four steps by the plain recipe, then continued by this one: learning rates, or the refusal
  shown,   // the recipe as shown; only for what is nothing but a text about the recipe
};

struct Proof {
  enum class Kind {
    changes,  // `base`, and `base` with the value (and `when`, read only beside it), differ in `view`
    refused,  // train refuses the value by the name of this field
    // C0604 or C0606 on this field; with `when` it is read, and train refuses a field of `when` by name
    idle,
    ruled,   // an error of the rule `rule` on the value
    warned,  // a warning of the rule `rule` on the value, which changes nothing
    allows,  // without the value the rule `rule` refuses the recipe
    // read outside the trainer; a test case of the file `rule` that begins with `value` compares two runs
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

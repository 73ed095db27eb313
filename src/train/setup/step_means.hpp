// Means over the steps between two logged points.
#pragma once

#include <cstdint>

namespace capstan::train {

// Part of a checkpoint, so that a resumed run logs the numbers of an uninterrupted one.
struct StepMeans {
  int64_t steps = 0;
  // Number of tokens that have a loss.
  double tokens = 0;
  // Mean over these tokens.
  double loss = 0;
  // Mean over the steps.
  double grad_norm = 0;

  // The mean of one step is that step's value to the bit.
  void add(double step_loss, int64_t step_tokens, double step_grad_norm) {
    ++steps;
    tokens += static_cast<double>(step_tokens);
    if (step_tokens > 0)
      loss += (step_loss - loss) * (static_cast<double>(step_tokens) / tokens);
    else if (tokens == 0)
      loss = step_loss;
    grad_norm += (step_grad_norm - grad_norm) / static_cast<double>(steps);
  }
};

}  // namespace capstan::train

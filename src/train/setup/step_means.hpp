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
  // Mean over the steps whose gradients do not overflow at the loss scale; not finite if all overflow.
  double grad_norm = 0;
  // The number of steps in that mean.
  int64_t norms = 0;

  // After one step, the mean has the bits of that step's value.
  void add(double step_loss, int64_t step_tokens, double step_grad_norm, bool overflow) {
    ++steps;
    tokens += static_cast<double>(step_tokens);
    if (step_tokens > 0)
      loss += (step_loss - loss) * (static_cast<double>(step_tokens) / tokens);
    else if (tokens == 0)
      loss = step_loss;
    if (overflow) {
      if (norms == 0) grad_norm = step_grad_norm;
      return;
    }
    if (norms == 0) grad_norm = 0;
    ++norms;
    grad_norm += (step_grad_norm - grad_norm) / static_cast<double>(norms);
  }
};

}  // namespace capstan::train

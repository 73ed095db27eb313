#pragma once

#include "kernels/activation.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// y[N, f] = act(x + bias) of x[N, f], or gated: act(gate + bias) * (up + bias) of x[N, 2 f] = [gate, up].
// Saves x only; the gradient overwrites its memory. `reader`: as for norm().
Var bias_activation(Tape& tape, const Var& x, const Parameter* bias, kernels::ActivationKind kind, bool gated,
                    const Parameter* reader = nullptr);

// y[N, f] = function(x) of x[N, f], or gated of x[N, 2 f] = [gate, up], with slope, limits and offset. Saves
// x only; the gradient overwrites its memory.
Var activation(Tape& tape, const Var& x, const kernels::ActivationFunction& function);

}  // namespace capstan::ops

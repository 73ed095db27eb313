#!/usr/bin/env python3
"""Updates of Muon: python3 tests/optim/make_muon.py

Writes tests/optim/muon.json: for each case the options, a weight matrix `start`, one row of `gradients` a
step, and the weights after every step. Momentum, weight decay and scaling are those of torch.optim.Muon, in
double. Its Newton-Schulz iterations, which compute in bf16, are replaced by the same iterations in double,
with other coefficients where a case has them; matrices that are packed in one, as queries, keys and values of
groups of heads are, go through them separately. Checks that in bf16 the replacement gives PyTorch's own
result. Needs torch 2.9 or newer.
"""

import json
import pathlib

import torch
from torch.optim import _muon

STEPS, DECAY, LR = 4, 0.1, [0.02, 0.03, 0.01, 0.005]
COEFFICIENTS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)],
    "polar_express": [(8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
                      (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
                      (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750)],
}
# PyTorch's names of the scale modes, and the factor that is in them.
SCALES = {"shape_scaling": ("original", 1.0), "spectral": ("match_rms_adamw", 0.2),
          "unit_rms_norm": ("spectral_unclamped", 1.0)}


def newton_schulz(g, coefficients, steps, dtype=torch.float64):
    x = g.to(dtype=dtype, copy=True)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for i in range(steps):
        a, b, c = coefficients[min(i, len(coefficients) - 1) if len(coefficients) == 8 else
                               i % len(coefficients)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def run(case, start, gradients):
    coefficients, steps = COEFFICIENTS[case["coefficients"]], case["steps"]
    mode, factor = SCALES[case["scale"]]

    def scale(shape):
        return _muon._adjust_lr(1.0, mode, shape)

    def orthogonalize(g, *_):
        if not case["split"]:
            return newton_schulz(g, coefficients, steps) * case["extra"] / factor
        packed = g.view(-1, sum(case["split"]), g.size(1))
        parts = [newton_schulz(p.reshape(-1, g.size(1)), coefficients, steps) *
                 scale((p.size(0) * p.size(1), g.size(1))) / scale(g.shape)
                 for p in packed.split(case["split"], dim=1)]
        return torch.cat([p.view(packed.size(0), -1, g.size(1)) for p in parts], 1).view(
            g.shape) * case["extra"] / factor

    original, _muon._zeropower_via_newtonschulz = _muon._zeropower_via_newtonschulz, orthogonalize
    p = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([p], lr=1, weight_decay=DECAY, momentum=0.95, nesterov=case["nesterov"],
                                 adjust_lr_fn=mode)
    rows = []
    for lr, gradient in zip(LR, gradients):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = gradient.clone()
        optimizer.step()
        rows.append([round(v, 8) for v in p.detach().flatten().tolist()])
    _muon._zeropower_via_newtonschulz = original
    return rows


def main():
    torch.manual_seed(11)
    g = torch.randn(7, 5)
    theirs = _muon._zeropower_via_newtonschulz(g, COEFFICIENTS["simple"][0], 5, 1e-7)
    assert torch.equal(newton_schulz(g, COEFFICIENTS["simple"], 5, torch.bfloat16), theirs)

    cases = []
    for i, (shape, coefficients, steps, nesterov, scale, extra, split) in enumerate([
            ((7, 5), "simple", 5, True, "shape_scaling", 1.0, []),
            ((5, 9), "simple", 4, False, "spectral", 0.2, []),
            ((6, 6), "quintic", 5, False, "unit_rms_norm", 1.0, []),
            ((1, 11), "quintic", 10, True, "spectral", 1.0, []),
            ((13, 3), "polar_express", 9, False, "shape_scaling", 0.5, []),
            ((20, 7), "simple", 5, False, "spectral", 1.0, [6, 2, 2]),
            ((9, 12), "quintic", 5, True, "shape_scaling", 1.0, [5, 2, 2])]):
        case = {"shape": shape, "coefficients": coefficients, "steps": steps, "nesterov": nesterov,
                "scale": scale, "extra": extra, "split": split}
        torch.manual_seed(i)
        start = torch.randn(shape).double().round(decimals=3)
        gradients = torch.randn(STEPS, *shape).double().round(decimals=3)
        cases.append(dict(case, start=start.flatten().tolist(),
                          gradients=[row.flatten().tolist() for row in gradients],
                          weights=run(case, start, gradients)))
    result = {"lr": LR, "weight_decay": DECAY, "momentum": 0.95, "cases": cases}
    path = pathlib.Path(__file__).with_name("muon.json")
    path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Updates of PyTorch's optimizers: python3 tests/optim/make_optimizers.py

Writes tests/optim/optimizers.json: the weights `start`, one row of `gradients` and one of `lr` a step, and
for each case the weights after every step. AdamW, Adam with L2 regularization and SGD are torch.optim's, Lion
(Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) is that of the package lion-pytorch. SGD
with decoupled weight decay ("SGDW", Loshchilov and Hutter, 2019) is torch.optim's SGD after the weights have
been multiplied by 1 - lr * weight_decay.
Needs torch and lion-pytorch.
"""

import json
import pathlib

import torch
from lion_pytorch import Lion

STEPS, SIZE, DECAY = 6, 23, 0.1
LR = [0.02, 0.03, 0.025, 0.01, 0.005, 0.001]


def run(start, gradients, make, decoupled):
    p = torch.nn.Parameter(start.clone())
    optimizer = make([p])
    rows = []
    for lr, gradient in zip(LR, gradients):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = gradient.clone()
        if decoupled:
            p.data.mul_(1 - lr * DECAY)
        optimizer.step()
        rows.append(p.detach().tolist())
    return rows


def main():
    torch.manual_seed(7)
    start = torch.randn(SIZE)
    gradients = torch.randn(STEPS, SIZE) * torch.logspace(-4, 1, SIZE)
    gradients[:, 3] = 0  # a weight that never gets a gradient
    cases = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY),
        "adam_l2": lambda p: torch.optim.Adam(p, lr=1, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY),
        "sgd": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9),
        "sgd_without_momentum": lambda p: torch.optim.SGD(p, lr=1),
        "sgd_l2": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, weight_decay=DECAY),
        "lion": lambda p: Lion(p, lr=1, betas=(0.95, 0.98), weight_decay=DECAY),
    }
    result = {"lr": LR, "weight_decay": DECAY, "start": start.tolist(), "gradients": gradients.tolist(),
              "cases": {name: run(start, gradients, make, name in ("sgd", "sgd_without_momentum"))
                        for name, make in cases.items()}}
    path = pathlib.Path(__file__).with_name("optimizers.json")
    path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

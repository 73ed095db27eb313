"""Writes tests/optim/loss_scaler.json: loss scales over steps with and without overflow.

The class below transcribes the rules of DynamicGradScaler in Megatron-LM
(megatron/core/optimizer/grad_scaler.py): growth and hysteresis trackers, both in Megatron's order.

    python3 tests/optim/make_loss_scaler.py
"""

import json
import pathlib
import random


class DynamicGradScaler:
    def __init__(self, initial_scale, min_scale, growth_interval, hysteresis):
        self.scale = initial_scale
        self.min_scale = min_scale
        self.growth_factor, self.backoff_factor = 2.0, 0.5
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

    def update(self, found_inf):
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * self.growth_factor


def case(seed, initial, minimum, window, hysteresis, overflow_share):
    generator = random.Random(seed)
    scaler = DynamicGradScaler(initial, minimum, window, hysteresis)
    steps = []
    for _ in range(120):
        overflow = generator.random() < overflow_share
        scaler.update(overflow)
        steps.append([int(overflow), scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker])
    return {"initial": initial, "minimum": minimum, "window": window, "hysteresis": hysteresis,
            "steps": steps}


cases = [
    case(1, 2.0**32, 1.0, 10, 2, 0.1),
    case(2, 2.0**16, 1.0, 3, 1, 0.3),
    case(3, 8.0, 0.5, 4, 3, 0.6),
    case(4, 1024.0, 1000.0, 7, 2, 0.5),
    case(5, 3.0, 0.7, 1, 2, 0.5),
]
text = "[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n"
pathlib.Path(__file__).with_name("loss_scaler.json").write_text(text)

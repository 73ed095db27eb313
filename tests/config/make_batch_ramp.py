"""Writes tests/config/batch_ramp.json: global batch sizes by consumed samples.

The class below transcribes the rules of RampupBatchsizeNumMicroBatchesCalculator in Megatron-LM
(megatron/core/num_microbatches_calculator.py), and `iterations` those of update_train_iters
(megatron/training/training.py), which counts the steps after the ramp with the size that is not rounded; here
it is that of the steps. Where a run ends inside of the ramp, Megatron counts the step that goes beyond
train_samples too; Capstan counts full steps only, as both do after the ramp.

    python3 tests/config/make_batch_ramp.py
"""

import json
import pathlib


class Ramp:
    def __init__(self, start, increment, samples, global_batch_size, unit):
        assert (global_batch_size - start) % increment == 0
        self.start, self.increment = start, increment
        self.samples, self.global_batch_size = samples, global_batch_size
        self.samples_per_increment = samples / ((global_batch_size - start) // increment)
        # Micro-batch size * data-parallel size, where decrease_batch_size_if_needed is set; else 1.
        self.unit = unit

    # get_current_running_global_batch_size()
    def size(self, consumed):
        if consumed > self.samples:
            return self.global_batch_size // self.unit * self.unit
        steps = int(consumed / self.samples_per_increment)
        size = self.start + steps * self.increment
        assert size <= self.global_batch_size
        return size // self.unit * self.unit


def iterations(ramp, train_samples):
    consumed = count = 0
    while consumed <= ramp.samples and consumed <= train_samples:
        consumed += ramp.size(consumed)
        count += 1
    if train_samples > consumed:
        count += (train_samples - consumed) // ramp.size(ramp.samples + 1)
    return count


def case(start, increment, samples, global_batch_size, train_samples, unit=1):
    ramp = Ramp(start, increment, samples, global_batch_size, unit)
    consumed, steps = 0, []
    while consumed + ramp.size(consumed) <= train_samples:
        steps.append([consumed, ramp.size(consumed)])
        consumed += ramp.size(consumed)
    ends_inside = consumed <= samples
    assert iterations(ramp, train_samples) == len(steps) + ends_inside
    return {"ramp": [start, increment, samples], "global_batch_size": global_batch_size, "unit": unit,
            "train_samples": train_samples, "iterations": len(steps), "steps": steps}


cases = [
    case(2, 2, 40, 8, 100),
    case(4, 4, 100, 32, 403),
    case(16, 16, 1000, 256, 4000),
    case(6, 9, 77, 33, 500),
    case(1, 1, 10, 3, 40),
    case(32, 480, 320, 512, 5000),
    # Runs that end inside of the ramp: between two sizes, within one, at its end, and within the first.
    case(2, 2, 40, 8, 14),
    case(6, 9, 77, 33, 71),
    case(4, 4, 100, 32, 100),
    case(16, 16, 1000, 256, 79),
    # Sizes that are rounded down: some to the same size, and the last before the ramp ends.
    case(5, 2, 60, 15, 300, 4),
    case(6, 9, 77, 33, 500, 6),
    case(7, 1, 100, 11, 250, 3),
    case(8, 3, 40, 23, 60, 8),
]
text = "[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n"
pathlib.Path(__file__).with_name("batch_ramp.json").write_text(text)

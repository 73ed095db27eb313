"""Writes the fixtures of tests/checkpoint and tests/train/records_*:
files as the reference implementations write them.

    python tests/golden/make_checkpoint_fixtures.py

Needs numpy, torch, safetensors and tensorboard (see scripts/peers).
The output is committed in tests/golden/checkpoint/.
"""

import pathlib
import struct

import numpy as np
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file as save_torch
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

OUT = pathlib.Path(__file__).parent / "checkpoint"


def ramp(shape, dtype, start=0):
    count = int(np.prod(shape))
    return (np.arange(start, start + count, dtype=np.float64).reshape(shape)).astype(dtype)


def main():
    OUT.mkdir(exist_ok=True)
    # Every element type of Capstan, names that need escaping, a scalar, an empty tensor, odd sizes.
    save_torch(
        {
            "b.weight": torch.from_numpy(ramp((3, 5), np.float32)) / 8,
            "a.weight": torch.from_numpy(ramp((7,), np.float32)) / -4,
            "half": (torch.from_numpy(ramp((2, 3), np.float32)) / 16).to(torch.float16),
            "brain": (torch.from_numpy(ramp((2, 2, 2), np.float32)) * 1.25).to(torch.bfloat16),
            "double": torch.from_numpy(ramp((2,), np.float64)) / 3,
            "ids": torch.from_numpy(ramp((4,), np.int64)) - (1 << 40),
            "small": torch.from_numpy(ramp((3,), np.int32)) - 1,
            "bytes": torch.from_numpy(ramp((5,), np.uint8)) + 250,
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros((0, 4)),
            "name \"quoted\" \\ Größe 日本": torch.tensor([1, -1], dtype=torch.int8),
            "i16": torch.tensor([-2, 3], dtype=torch.int16),
        },
        OUT / "types.safetensors",
        metadata={"format": "pt"},
    )
    # Types that Capstan lists but does not compute with.
    save_torch({"mask": torch.tensor([True, False]), "x": torch.ones(1)}, OUT / "external.safetensors")
    save_numpy({"w": ramp((4, 6), np.float32)}, OUT / "plain.safetensors")
    # fp16 values of every kind and what they are in fp32: the conversion's truth.
    halves = torch.arange(0, 65536, 31, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    save_torch({"half": halves, "float": halves.to(torch.float32)}, OUT / "half.safetensors")

    with open(OUT / "events.golden", "wb") as file:
        writer = RecordWriter(file)
        events = [event_pb2.Event(wall_time=1.0, file_version="brain.Event:2")]
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        events.append(event_pb2.Event(wall_time=1.25, step=100, session_log=start))
        for wall, step, values in [
            (1.5, 101, [("loss", 2.5)]),
            (2.5, 1 << 40, [("loss", 2.25), ("lm/grad norm é", 1e-30)]),
            (3.5, 0, [("loss", float("inf")), ("zero", 0.0)]),
        ]:
            summary = summary_pb2.Summary(
                value=[summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values]
            )
            events.append(event_pb2.Event(wall_time=wall, step=step, summary=summary))
        # Thirty equal buckets from the least to the greatest value, or one.
        loads = [0.0, 0.5, 1.0, 2.5]
        width = 2.5 / 30
        counts = [0.0] * 30
        for load in loads:
            counts[min(int(load / width), 29)] += 1
        limits = [width * (i + 1) for i in range(29)] + [2.5]
        histograms = [
            ("loads", summary_pb2.HistogramProto(
                min=0.0, max=2.5, num=4, sum=4.0, sum_squares=7.5, bucket_limit=limits, bucket=counts)),
            ("equal", summary_pb2.HistogramProto(
                min=1.0, max=1.0, num=3, sum=3.0, sum_squares=3.0, bucket_limit=[1.0], bucket=[3.0])),
        ]
        values = [summary_pb2.Summary.Value(tag="loss", simple_value=2.0)]
        values += [summary_pb2.Summary.Value(tag=tag, histo=histogram) for tag, histogram in histograms]
        events.append(event_pb2.Event(wall_time=4.5, step=102, summary=summary_pb2.Summary(value=values)))
        for event in events:
            writer.write(event.SerializeToString())
    with open(OUT / "events.golden", "rb") as file:
        assert struct.unpack("<Q", file.read(8))[0] == 24


if __name__ == "__main__":
    main()

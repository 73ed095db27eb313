#!/usr/bin/env python3
"""Conversions to and from formats of 8 and 4 bits: python3 tests/tensor/make_float8.py

Writes tests/tensor/float8.safetensors. For each format, `FORMAT.values` are the fp32 values of all codes and
`FORMAT.codes` the codes of `inputs`, which hold every code's value, the points half way between neighbors,
the fp32 numbers beside these, subnormals, values beyond the largest and random ones. ml_dtypes converts;
where torch is installed, its float8_e4m3fn and float8_e5m2 must agree. Values beyond the largest are set to
the largest before the conversion, since both libraries make them NaN or infinite. Needs numpy, ml_dtypes and
safetensors.
"""

import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 256),
    "e5m2": (ml_dtypes.float8_e5m2, 256),
    "e2m1": (ml_dtypes.float4_e2m1fn, 16),
}


def values_of(kind, count):
    return np.arange(count, dtype=np.uint8).view(kind).astype(np.float32)


def inputs_of(values, seed):
    random = np.random.default_rng(seed)
    finite = np.unique(values[np.isfinite(values)]).astype(np.float64)
    exact = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    up, down = (np.nextafter(exact, np.float32(sign * np.inf)) for sign in (1, -1))
    near = np.concatenate([exact, up, down])
    largest = finite.max()
    wide = random.normal(size=1500) * np.exp2(random.uniform(-20, np.log2(largest) + 1, 1500))
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 2 * largest, -2 * largest, 1e30, 1e-30, 1e-44]
    return np.concatenate([near, wide.astype(np.float32), np.array(special, np.float32)]).astype(np.float32)


def check_with_torch(name, clipped, codes):
    try:
        import torch
    except ImportError:
        return
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(name)
    if kind is None:
        return
    numbers = ~np.isnan(clipped)
    theirs = torch.from_numpy(clipped).to(kind).view(torch.uint8).numpy()
    assert np.array_equal(theirs[numbers], codes[numbers]), name
    print(f"{name}: torch {torch.__version__} agrees")


def main():
    tensors = {}
    for seed, (name, (kind, count)) in enumerate(FORMATS.items()):
        values = values_of(kind, count)
        largest = np.float32(values[np.isfinite(values)].max())
        inputs = inputs_of(values, seed)
        clipped = np.clip(inputs, -largest, largest)
        if name == "e2m1":
            clipped = np.where(np.isnan(clipped), largest, clipped)
        codes = clipped.astype(kind).view(np.uint8)
        check_with_torch(name, clipped, codes)
        tensors |= {f"{name}.values": values, f"{name}.inputs": inputs, f"{name}.codes": codes}
    save_file(tensors, pathlib.Path(__file__).with_name("float8.safetensors"))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""NF4 codes and scales after bitsandbytes' formulas: python3 tests/parallel/make_nf4.py

Writes tests/parallel/nf4.safetensors. For each case the matrix `values`, its `codes` (two to a byte), the
`scales` of its blocks, what they give back (`expanded`), and with double quantization `scale_codes`,
`nested`, `offset` and `expanded_double`; `map` is the 8-bit dynamic map. Needs numpy, torch, safetensors;
where bitsandbytes is installed its own functions must agree.
"""

import pathlib

import numpy as np
import torch
from safetensors.numpy import save_file

F = np.float32
# bitsandbytes.functional.get_4bit_type("nf4").
VALUES = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                   -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                   0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                   0.7229568362236023, 1.0], F)
LIMITS = (VALUES[:-1] + VALUES[1:]) / F(2)


def dynamic_map():
    data = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        data += means.tolist() + (-means).tolist()
    return np.array(sorted(data), F)


def in_blocks(x, block):
    count = -(-x.size // block)
    padded = np.zeros(count * block, F)
    padded[: x.size] = x
    return padded.reshape(count, block)


def blockwise(x, block, limits):
    """The largest magnitude of each block, and for each element the number of limits below its share of
    it.
    """
    rows = in_blocks(x, block)
    scales = np.abs(rows).max(axis=1)
    inverse = F(1) / np.maximum(scales, F(1e-38))  # a block of zeros stays one
    return scales, np.searchsorted(limits, (rows * inverse[:, None]).reshape(-1)[: x.size],
                                   side="left").astype(np.uint8)


def expand(values, codes, scales, block):
    return (in_blocks(values[codes], block) * scales[:, None]).reshape(-1)[: codes.size]


def make(values, block):
    x, table = values.reshape(-1), dynamic_map()
    scales, codes = blockwise(x, block, LIMITS)
    padded = np.append(codes, np.zeros(codes.size % 2, np.uint8))
    if codes.size % 2:
        padded[-1] = 7  # zero
    offset = F(scales.astype(np.float64).mean())
    nested, scale_codes = blockwise(scales - offset, 256, (table[:-1] + table[1:]) / F(2))
    restored = expand(table, scale_codes, nested, 256) + offset
    made = {"values": values, "codes": padded[::2] << 4 | padded[1::2], "scales": scales,
            "expanded": expand(VALUES, codes, scales, block).reshape(values.shape),
            "scale_codes": scale_codes, "nested": nested, "offset": np.array([offset]),
            "expanded_double": expand(VALUES, codes, restored, block).reshape(values.shape)}
    compare(made, block)
    return made


def compare(made, block):
    try:
        import bitsandbytes.functional as bnb
    except ImportError:
        return print("bitsandbytes is not installed: not compared")
    x = torch.from_numpy(made["values"])
    codes, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
    assert np.array_equal(codes.numpy().reshape(-1), made["codes"])
    assert np.array_equal(np.where(state.absmax.numpy() > 1e-37, state.absmax.numpy(), F(0)), made["scales"])
    assert np.array_equal(bnb.dequantize_4bit(codes, state).numpy(), made["expanded"])
    codes, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4", compress_statistics=True)
    assert np.array_equal(codes.numpy().reshape(-1), made["codes"])
    # Its mean and its division of the last, partial blocks may round otherwise.
    assert np.allclose(state.offset, made["offset"], rtol=3e-7, atol=0)
    assert np.allclose(state.state2.absmax, made["nested"], rtol=1e-5, atol=1e-9)
    other = int((state.absmax.numpy() != made["scale_codes"]).sum())
    assert np.allclose(bnb.dequantize_4bit(codes, state), made["expanded_double"], rtol=1e-4, atol=1e-6)
    print(f"bitsandbytes agrees; {other} of {made['scale_codes'].size} scale codes differ")


def main():
    random = np.random.default_rng(5)
    zero = random.normal(size=(8, 64)).astype(F)
    zero[3] = 0
    bf16 = torch.tensor(random.normal(size=(6, 96)), dtype=torch.bfloat16).float().numpy()
    edges = np.append(LIMITS, np.append(VALUES, np.nextafter(LIMITS, F(1)))).reshape(2, 23)
    cases = {"odd.64": random.normal(size=(7, 19)), "rows.64": zero,
             "wide.4096": random.normal(size=(3, 1777)) * 0.02,
             "many.32": random.normal(size=(93, 97)) * np.linspace(0.1, 3, 97), "bf16.128": bf16,
             "edges.64": edges, "equal.32": np.full((3, 32), -0.25)}
    tensors = {"map": dynamic_map()}
    for name, values in cases.items():
        made = make(np.ascontiguousarray(values, F), int(name.split(".")[1]))
        tensors |= {f"{name}.{key}": np.ascontiguousarray(value) for key, value in made.items()}
    save_file(tensors, pathlib.Path(__file__).with_name("nf4.safetensors"))


main()

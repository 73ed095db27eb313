#!/usr/bin/env python3
"""Codes and scales of the scaling recipes: python3 tests/kernels/make_quantize.py

Writes tests/kernels/quantize.safetensors: matrices `ROWSxCOLS.values`, and for each RECIPE.FORMAT.ROWSxCOLS,
in short CASE, `CASE.rows.codes` and `CASE.rows.scale` along the rows, `CASE.columns.…` of the transpose, and
`CASE.tensor_scale` where the recipe has one. The formulas are those of Transformer Engine, with ml_dtypes for
the conversions. Needs numpy, ml_dtypes, safetensors.
"""

import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

F = np.float32
KINDS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
LARGEST = {"e4m3": F(448), "e5m2": F(57344), "e2m1": F(6)}


def convert(values, kind):
    limit = LARGEST[kind]
    return np.clip(values, -limit, limit).astype(KINDS[kind])


def packed(codes, kind):
    bits = codes.view(np.uint8)
    if kind != "e2m1":
        return bits
    if bits.shape[1] % 2:
        bits = np.pad(bits, ((0, 0), (0, 1)))
    return bits[:, 0::2] | bits[:, 1::2] << 4


def in_blocks(matrix, height, width):
    """Yields (block row, block column, slices)."""
    for i, r in enumerate(range(0, matrix.shape[0], height)):
        for j, c in enumerate(range(0, matrix.shape[1], width)):
            yield i, j, (slice(r, r + height), slice(c, c + width))


def power_of_two_scale(amax, kind):
    """The largest power of two whose product with amax does not exceed the largest code."""
    if amax == 0:
        return F(1)
    return F(2.0 ** np.floor(np.log2(np.float64(LARGEST[kind] / F(amax)))))


def block_scaled(matrix, kind, height, width):
    codes = np.empty(matrix.shape, KINDS[kind])
    scale = np.empty((-(-matrix.shape[0] // height), -(-matrix.shape[1] // width)), F)
    for i, j, where in in_blocks(matrix, height, width):
        factor = power_of_two_scale(np.abs(matrix[where]).max(), kind)
        codes[where] = convert(matrix[where] * factor, kind)
        scale[i, j] = F(1) / factor
    return codes, scale


def mxfp8(matrix, kind):
    codes = np.empty(matrix.shape, KINDS[kind])
    scale = np.empty((matrix.shape[0], -(-matrix.shape[1] // 32)), np.uint8)
    for i, j, where in in_blocks(matrix, 1, 32):
        amax = F(np.abs(matrix[where]).max())
        exponent = 0 if amax == 0 else int(np.ceil(np.log2(np.float64(amax / LARGEST[kind]))))
        exponent = max(-127, exponent)
        codes[where] = convert((matrix[where].astype(np.float64) * 2.0**-exponent).astype(F), kind)
        scale[i, j] = exponent + 127
    return codes, scale


def nvfp4(matrix, tensor_scale, height):
    codes = np.empty(matrix.shape, KINDS["e2m1"])
    scale = np.empty((matrix.shape[0], -(-matrix.shape[1] // 16)), KINDS["e4m3"])
    for i, j, where in in_blocks(matrix, height, 16):
        amax = F(np.abs(matrix[where]).max())
        block = convert(amax * (F(1) / F(6)) * tensor_scale, "e4m3")
        wide = F(block)
        factor = F(0) if wide == 0 else min(tensor_scale / wide, np.finfo(F).max)
        codes[where] = convert(matrix[where] * factor, "e2m1")
        scale[i * height : i * height + height, j] = block
    return codes, scale.view(np.uint8)


def values_of(random, rows, cols, deviation):
    values = random.normal(size=(rows, cols)) * np.exp(random.normal(size=(rows, cols)) * deviation)
    values *= np.exp2(random.integers(-12, 6))
    values[random.random((rows, cols)) < 0.02] = 0
    if rows > 40:
        values[32:48, :33] = 0
    return values.astype(F)


def case(matrix, recipe, kind):
    tensors = {}
    amax = F(np.abs(matrix).max())
    if recipe in ("tensor", "nvfp4", "nvfp4_square"):
        largest = LARGEST[kind] * (F(1) if recipe == "tensor" else F(448))
        factor = largest / amax
        tensors["tensor_scale"] = np.array([factor, F(1) / factor], F)
    for name, m in (("rows", matrix), ("columns", np.ascontiguousarray(matrix.T))):
        if recipe == "tensor":
            codes, scale = convert(m * factor, kind), None
        elif recipe == "block_1x128":
            codes, scale = block_scaled(m, kind, 1, 128)
        elif recipe == "block_128x128":
            codes, scale = block_scaled(m, kind, 128, 128)
        elif recipe == "mxfp8":
            codes, scale = mxfp8(m, kind)
        else:
            codes, scale = nvfp4(m, factor, 16 if recipe == "nvfp4_square" else 1)
        tensors[f"{name}.codes"] = np.ascontiguousarray(packed(codes, kind))
        if scale is not None:
            tensors[f"{name}.scale"] = np.ascontiguousarray(scale)
    return tensors


def main():
    random = np.random.default_rng(7)
    matrices = {"1x1": values_of(random, 1, 1, 0.5), "3x37": values_of(random, 3, 37, 1.0),
                "50x130": values_of(random, 50, 130, 2.0)}
    tensors = {f"{size}.values": matrix for size, matrix in matrices.items()}
    for recipe, kinds in (
        ("tensor", ("e4m3", "e5m2")),
        ("block_1x128", ("e4m3", "e5m2")),
        ("block_128x128", ("e4m3",)),
        ("mxfp8", ("e4m3", "e5m2")),
        ("nvfp4", ("e2m1",)),
        ("nvfp4_square", ("e2m1",)),
    ):
        for kind in kinds:
            for size, matrix in matrices.items():
                for key, value in case(matrix, recipe, kind).items():
                    tensors[f"{recipe}.{kind}.{size}.{key}"] = value
    # Scalars as one element.
    tensors = {key: value.reshape(-1) for key, value in tensors.items()}
    save_file(tensors, pathlib.Path(__file__).with_name("quantize.safetensors"))


if __name__ == "__main__":
    main()

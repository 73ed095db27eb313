#!/usr/bin/env python3
"""Writes tests/data/indexed/: what megatron-core and numpy make of small datasets.

Needs megatron-core (with its compiled helpers), torch and numpy; scripts/peers.sh builds such an environment.
The C++ tests read the files and need none of it. Run it again only to change a fixture:
the output is a function of this file.
"""

import json
import pathlib
import tempfile
import types

import numpy
import torch
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

OUT = pathlib.Path(__file__).resolve().parent.parent / "data" / "indexed"
EOD = 99


def write(prefix, documents, dtype):
    """documents: lists of sentences, each a list of ids."""
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=dtype)
    for sentences in documents:
        sentences = [s for s in sentences if s]
        builder.add_document([t for s in sentences for t in s], [len(s) for s in sentences])
    builder.finalize(str(prefix) + ".idx")


def documents_of(seed, count, longest):
    """Documents of 0 to `longest` tokens below 99, most of them closed by EOD."""
    rng = numpy.random.RandomState(seed)
    result = []
    for _ in range(count):
        ids = rng.randint(0, EOD, size=rng.randint(0, longest + 1)).tolist()
        if ids and rng.randint(0, 4):
            ids[-1] = EOD
        result.append([ids])
    return result


def config_of(seq, seed, split=None, blend=None, blend_per_split=None):
    tokenizer = types.SimpleNamespace(eod=EOD, pad=-1, vocab_size=100, unique_identifiers={"class": "none"})
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=tempfile.mkdtemp(),
    )


def texts(dataset, count):
    rows = []
    for i in range(min(count, len(dataset))):
        row = dataset[i]
        rows.append(row["tokens"].tolist() + [int(row["labels"][-1])])
    return rows


def shuffles():
    cases = []
    for seed in (0, 1, 1234, 4294967295):
        random = numpy.random.RandomState(seed)
        case = {"seed": seed, "words": [], "shuffled": []}
        for n in (1, 2, 10, 17, 257):
            values = numpy.arange(n, dtype=numpy.int32)
            random.shuffle(values)
            case["shuffled"].append(values.tolist())
        case["words"] = random.randint(0, 2**32, size=8, dtype=numpy.uint32).tolist()
        cases.append(case)
    return cases


def splits():
    cases = []
    for split in ("969,30,1", "9999,8,2", "1,1,1", "90,10", "1", "0,1,0", "98.5,1,0.5"):
        for count in (1, 2, 3, 5, 10, 25, 50, 60, 101, 12345, 9999999):
            ranges = []
            for share in convert_split_vector_to_split_matrix(parse_and_normalize_split(split)):
                ranges.append(share and [int(round(share[0] * float(count))),
                                         int(round(share[1] * float(count)))])
            cases.append({"split": split, "count": count, "ranges": ranges})
    return cases


def blends():
    cases = []
    for weights in ([1.0], [0.5, 0.5], [0.3, 0.7], [30, 60, 10], [1, 1, 1, 1, 1, 1, 1], [0.0, 2.0, 1.0],
                    [0.001, 0.999]):
        normal = (numpy.array(weights, dtype=numpy.float64) /
                  numpy.sum(numpy.array(weights, dtype=numpy.float64))).tolist()
        size = 300
        index, sample = numpy.zeros(size, numpy.int16), numpy.zeros(size, numpy.int64)
        helpers_cpp.build_blending_indices(index, sample, normal, len(normal), size, False)
        cases.append({"weights": weights, "dataset": "".join(map(str, index)),
                                 "last_sample": int(sample[-1])})
    return cases


def orders():
    # Indices and samples of one split of one dataset. (No split may be without tokens: Megatron would look
    # for the number of its epochs forever.)
    cases = []
    for name, split, part, seq, seed, samples in (
        ("a", "1", 0, 8, 1234, None),
        ("a", "1", 0, 8, 1234, 60),
        ("a", "969,31", 0, 16, 7, 100),
        ("a", "8,2", 1, 5, 1234, 90),
        ("a", "8,2", 0, 7, 42, 230),
        ("b", "1", 0, 4, 1, 27),
        ("b", "1", 0, 64, 1, 9),
    ):
        sizes = [None, None, None]
        sizes[part] = samples
        config = config_of(seq, seed, split=split, blend=([str(OUT / name)], None))
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[part]
        cases.append(
            {
                "name": name,
                "split": split,
                "part": part,
                "seq": seq,
                "seed": seed,
                "samples": samples,
                "document_index": dataset.document_index.tolist(),
                "sample_index": dataset.sample_index.tolist(),
                "shuffle_index": dataset.shuffle_index.tolist(),
                "texts": texts(dataset, 12),
            }
        )
    return cases


def builds():
    # Full builds: blends by weight and by size, and a blend for each split.
    a, b = str(OUT / "a"), str(OUT / "b")
    cases = []
    for what, sizes, options in (
        ("weights", [150, 12, 5], dict(split="8,1,1", blend=([a, b], [3.0, 1.0]))),
        ("sizes", [70, 5, 3], dict(split="8,1,1", blend=([a, b], None))),
        ("all", [None, None, None], dict(split="8,1,1", blend=([a, b], None))),
        ("one with weight", [60, 6, 6], dict(split="8,1,1", blend=([a], [1.0]))),
        ("per split", [80, 9, 11], dict(blend_per_split=[([a, b], [0.5, 0.5]), ([b], None), ([a], [2.0])])),
    ):
        config = config_of(6, 1234, **options)
        splits = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        cases.append(
            {
                "what": what,
                "sizes": sizes,
                "lengths": [len(d) for d in splits],
                "texts": [texts(d, 20) for d in splits],
            }
        )
    return cases


def masks():
    cases = []
    for seed in range(4):
        tokens = numpy.random.RandomState(seed).randint(0, 9, size=24).astype(numpy.int64)
        tokens[tokens == 7] = EOD
        tokens[tokens == 8] = EOD
        if seed == 3:
            tokens[[0, 11, 12, 23]] = EOD
        for flags in range(8):
            position, attention, loss = bool(flags & 1), bool(flags & 2), bool(flags & 4)
            mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
                torch.from_numpy(tokens), EOD, position, attention, loss, True
            )
            # True means hidden. Row i sees from its document's start to itself:
            # the first visible column is that start.
            starts = [int(torch.nonzero(~row)[0]) for row in mask[0]]
            cases.append(
                {
                    "tokens": tokens.tolist(),
                    "flags": [position, attention, loss],
                    "loss_mask": [int(x) for x in loss_mask.tolist()],
                    "position_ids": position_ids.tolist(),
                    "starts": starts,
                }
            )
    return cases


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    # Blends ask for their rank.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    # A small text set in both types, with empty documents and documents of several sequences.
    small = [[[1, 2, 3]], [[]], [[4, 5], [6], []], [[7, 8, 9, 10, 65499]], [[]]]
    write(OUT / "small_u16", small, numpy.uint16)
    small[3] = [[7, 8, 9, 10, 128000]]
    write(OUT / "small_i32", small, numpy.int32)
    write(OUT / "a", documents_of(1, 60, 30), numpy.uint16)
    write(OUT / "b", documents_of(2, 25, 9), numpy.int32)
    result = {case.__name__: case() for case in (shuffles, splits, blends, orders, builds, masks)}
    with open(OUT / "megatron.json", "w") as out:
        out.write("{\n")
        for i, (key, value) in enumerate(result.items()):
            out.write(f'"{key}": [\n')
            out.write(",\n".join(json.dumps(v, separators=(",", ":")) for v in value))
            out.write("\n]" + (",\n" if i + 1 < len(result) else "\n"))
        out.write("}\n")


if __name__ == "__main__":
    main()

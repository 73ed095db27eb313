#!/usr/bin/env python3
"""`capstan data prepare` against its peers: megatron-core's IndexedDataset reads what it wrote, and the
tokens are those of the Hugging Face tokenizer of the same tokenizer.json.

    scripts/peers/check_indexed.py [--capstan build/release/capstan] [--tokenizer tokenizer.json]
                                   [--text FILE]

Without --tokenizer one is trained on the text; without --text a small multilingual one is made up. Needs
megatron-core, torch and tokenizers (scripts/peers.sh).
"""

import argparse
import gzip
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import tokenizers
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, DType

EOD = "<|endoftext|>"
PIECES = [
    "The capstan hauls one load with many hands. ", "Der Wind ändert sich, «sagt» er: 3.14159 Knoten. ",
    "你好，世界。", "こんにちは ",
    "Привет, мир! ", "مرحبا بالعالم ", "नमस्ते ", "🙂👩‍👩‍👧 ", "x = {'a': 1}\n\tprint(x)\n", "   spaces   ",
    "e\u0301\u00e9 ", "don't we'll I'M ",
]


def make_text(count):
    rng = random.Random(1)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(0, 60))) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capstan", default="build/release/capstan")
    parser.add_argument("--tokenizer")
    parser.add_argument("--text", help="documents separated by blank lines")
    arguments = parser.parse_args()
    documents = (
        [d for d in pathlib.Path(arguments.text).read_text().split("\n\n") if d.strip()] if arguments.text
        else make_text(2000)
    )

    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        run = lambda *words: subprocess.run([arguments.capstan, *map(str, words)], check=True,
                                            stdout=subprocess.DEVNULL)
        tokenizer_path = arguments.tokenizer
        if not tokenizer_path:
            tokenizer_path = directory / "tokenizer.json"
            (directory / "text.txt").write_text("\n".join(documents))
            run("tokenizer", "train", directory / "text.txt", "--vocab-size", 600, "--output", tokenizer_path)
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        eod = tokenizer.token_to_id(EOD)
        if eod is None:
            sys.exit(f"the tokenizer has no {EOD}")

        # Documents of one string and of several, in one plain and one packed file.
        values = [d if i % 3 else [d[: len(d) // 2], "", d[len(d) // 2 :]] for i, d in enumerate(documents)]
        half = len(values) // 2
        lines = [json.dumps({"id": i, "text": v}, ensure_ascii=bool(i % 2)) + "\n"
                 for i, v in enumerate(values)]
        (directory / "a.jsonl").write_text("".join(lines[:half]))
        with gzip.open(directory / "b.jsonl.gz", "wt", encoding="utf-8") as out:
            out.write("".join(lines[half:]))
        prefix = directory / "out"
        run("data", "prepare", directory / "a.jsonl", directory / "b.jsonl.gz", "--tokenizer", tokenizer_path,
            "--append-eod", "--output", prefix)

        # What Megatron's preprocess_data.py does with the same ids, written by megatron-core.
        dtype = DType.optimal_dtype(vocabulary)
        builder = IndexedDatasetBuilder(str(directory / "expected.bin"), dtype=dtype)
        expected = []
        for value in values:
            sentences = [tokenizer.encode(s, add_special_tokens=False).ids
                         for s in (value if isinstance(value, list) else [value])]
            sentences = [s for s in sentences if s]
            if sentences:
                sentences[-1] = sentences[-1] + [eod]
            expected.append([t for s in sentences for t in s])
            builder.add_document(expected[-1], [len(s) for s in sentences])
        builder.finalize(str(directory / "expected.idx"))

        found = IndexedDataset(str(prefix) + "_text_document")
        bounds = found.document_indices
        assert len(bounds) == len(values) + 1, (len(bounds), len(values))
        for i, ids in enumerate(expected):
            got = [int(t) for s in range(bounds[i], bounds[i + 1]) for t in found[s]]
            assert got == ids, f"document {i}: {got[:20]} is not {ids[:20]}"
        for ending in ("bin", "idx"):
            ours = pathlib.Path(f"{prefix}_text_document.{ending}").read_bytes()
            theirs = (directory / f"expected.{ending}").read_bytes()
            assert ours == theirs, f"the .{ending} files differ"
        tokens = sum(map(len, expected))
        print(f"{len(values)} documents, {tokens} tokens of {vocabulary}: megatron-core reads them, "
              "the files are equal byte for byte")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""tokenizer.py TOKENIZER TEXT [DOCUMENT_BYTES]: Hugging Face tokenizers in processor time of one thread, for the documents of tokenizer_bench.

The checksum over all ids is the one that tokenizer_bench prints.
"""
import os
import sys
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    text = open(sys.argv[2], "rb").read()
    size = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
    documents, begin = [], 0
    while begin < len(text):
        end = text.find(b"\n", min(len(text) - 1, begin + size))
        end = len(text) if end < 0 else end + 1
        documents.append(text[begin:end].decode("utf-8"))
        begin = end
    start = time.process_time()
    total, checksum = 0, 0
    for first in range(0, len(documents), 1000):
        for encoding in tokenizer.encode_batch_fast(documents[first:first + 1000], add_special_tokens=False):
            pass
    seconds = time.process_time() - start
    for first in range(0, len(documents), 1000):
        for encoding in tokenizer.encode_batch_fast(documents[first:first + 1000], add_special_tokens=False):
            ids = numpy.array(encoding.ids, dtype=numpy.uint64)
            total += len(ids)
            if len(ids):
                powers = numpy.multiply.accumulate(numpy.concatenate([numpy.ones(1, numpy.uint64), numpy.full(len(ids), 31, numpy.uint64)]))
                checksum = (checksum * int(powers[-1]) + int((ids * powers[len(ids) - 1::-1][:len(ids)]).sum(dtype=numpy.uint64))) % 2**64
    print(f"{len(documents)} documents, {len(text) / 1e6:.1f} MB, {total} tokens, checksum {checksum:016x}; encode {len(text) / 1e6 / seconds:.1f} MB/s")


if __name__ == "__main__":
    main()

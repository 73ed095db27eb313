#!/usr/bin/env python3
"""data.py [--mb N] [--rounds N] [--text FILE] [--tokenizer FILE]: encoding and preparing text,
Capstan and Hugging Face, in turns.

Makes N million bytes (default 60) of distinct text from what a Debian machine has, learns two byte-level BPE
vocabularies of 32 000 from a fifth of it (the pre-tokenizers of GPT-2 and Llama 3), and then runs in turns,
each in its own process on one core:

  encode   Capstan: tokenizer_bench
           peer: Hugging Face `encode_batch_fast`, 10 documents at a time, one thread
  prepare  Capstan: `capstan data prepare --workers 1`
           peer: json.loads, the same `encode_batch_fast`, megatron-core's IndexedDatasetBuilder

Counted is processor time. Encoding: of the calls alone. Preparing: of Capstan the full process; of Python
without its imports and without loading the tokenizer. The ids and the files of both must be equal. --text and
--tokenizer take other ones. The files lie in build/bench-data. Needs tokenizers, megatron-core and torch
(scripts/peers.sh makes the environment).
"""
import argparse
import filecmp
import gzip
import hashlib
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time

PROSE = ["/usr/share/doc", "/usr/share/man", "/usr/share/info", "/usr/share/games/fortunes",
         "/usr/share/perl", "/usr/lib/python3"]
CODE = ["/usr/include"]
ENDINGS = re.compile(
    r"(\.[1-9][a-z]*|\.(py|pm|pod|txt|md|rst|html?|h|hpp|info(-\d+)?)|/[^./]+|"
    r"/(NEWS|README|changelog)[^/]*)(\.gz)?$")
LONGEST = 500_000  # bytes of one file: no changelog is a large part of the text
DOCUMENT = 2000    # bytes, and on to the end of the line


def paragraphs_of(path):
    """A file's paragraphs; of a manual page without its markup, of which half the file may consist."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            text = file.read(LONGEST).decode("utf-8", errors="strict")
    except (OSError, EOFError, UnicodeDecodeError):
        return []
    if "\0" in text:
        return []
    if "/man/" in path:
        text = re.sub(r'(?m)^[.\'](\\".*|(PP|TP|IP|LP|SH|SS|sp|P)\b.*)$', "", text)
        text = re.sub(r"(?m)^\.[A-Za-z]+ ?", "", text)
        text = re.sub(r"\\f([A-Z]|\(..|\[[^\]]*\])|\\[&%|^]", "",
                      text).replace("\\-", "-").replace("\\(aq", "'")
    elif path.endswith((".html", ".htm")):
        text = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", "", text)
    return re.split(r"\n[ \t]*\n+", text)


def make_text(path, size):
    """Paragraphs that the text has not had yet, of all files in an order that their names' hashes give."""
    seen, words, sources, total, kept, refused = set(), {}, {}, 0, 0, 0
    with open(path, "wb") as out:
        def put(paragraph):
            nonlocal total, kept
            data = (paragraph + "\n\n").encode()
            out.write(data)
            total += len(data)
            kept += 1
            for word in paragraph.split():
                words[word] = words.get(word, 0) + 1
            return len(data)

        for roots in (PROSE, CODE):
            files = [(hashlib.sha1(name.encode()).digest(), name, root) for root in roots
                     for folder, _, names in os.walk(root)
                     for name in (os.path.join(folder, n) for n in names)
                     if ENDINGS.search(name) and os.path.isfile(name) and not os.path.islink(name)]
            for _, name, root in sorted(files):
                for paragraph in paragraphs_of(name):
                    paragraph = paragraph.strip("\n")
                    # Alike but for digits and spaces counts as the same: lists of versions,
                    # tables of one form.
                    digest = hashlib.sha1(re.sub(r"[\d\s]+", "", paragraph).encode()).digest()[:12]
                    if len(paragraph) < 60:
                        continue
                    if digest in seen:
                        refused += 1
                        continue
                    seen.add(digest)
                    sources[root] = sources.get(root, 0) + put(paragraph)
                if total >= size:
                    break
            if total >= size:
                break
        real = total
        if total < size:  # too little on this machine: sentences drawn from a trigram model of what there is
            out.flush()
            corpus = open(path, encoding="utf-8").read().split()
            following, draw = {}, random.Random(1)
            for i in range(len(corpus) - 2):
                following.setdefault((corpus[i], corpus[i + 1]), []).append(corpus[i + 2])
            while total < size and corpus:
                at = draw.randrange(len(corpus) - 1)
                sentence = corpus[at:at + 2]
                while len(sentence) < 80 and tuple(sentence[-2:]) in following:
                    sentence.append(draw.choice(following[tuple(sentence[-2:])]))
                put(" ".join(sentence))
    places = ", ".join(f"{root} {bytes_ / 1e6:.1f}" for root, bytes_ in sources.items())
    print(f"text: {total / 1e6:.1f} MB, {kept} distinct paragraphs ({refused} left out as seen before), "
          f"{len(words)} distinct words of {sum(words.values())}; MB of it from {places}, "
          f"from a trigram model {(total - real) / 1e6:.1f}", flush=True)


def documents_of(path):
    """Split at newlines, as by tokenizer_bench."""
    text = open(path, "rb").read()
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", min(len(text) - 1, begin + DOCUMENT))
        end = len(text) if end < 0 else end + 1
        yield text[begin:end].decode("utf-8")
        begin = end


def batches(items):
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == 10:  # of 1, 10, 100 and 1000 the fastest for it
            yield batch
            batch = []
    if batch:
        yield batch


def peer_encode(tokenizer, text):
    """Prints the tokens, the checksum that tokenizer_bench prints,
    and the seconds of processor time of the encoding.
    """
    import numpy
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(tokenizer)
    seconds, total, checksum = 0.0, 0, 0
    for batch in batches(list(documents_of(text))):
        start = time.process_time()
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.process_time() - start
        for encoding in encodings:
            ids = numpy.array(encoding.ids, dtype=numpy.uint64)
            total += len(ids)
            powers = numpy.full(len(ids) + 1, 31, numpy.uint64)
            powers[0] = 1
            powers = numpy.multiply.accumulate(powers)
            checksum = (checksum * int(powers[-1]) +
                        int((ids * powers[:len(ids)][::-1]).sum(dtype=numpy.uint64))) % 2**64
    print(json.dumps({"tokens": total, "checksum": f"{checksum:016x}", "seconds": seconds}))


def peer_prepare(tokenizer, jsonl, prefix):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tokenizers import Tokenizer
    import torch
    tokenizer = Tokenizer.from_file(tokenizer)
    torch.set_num_threads(1)
    start = time.process_time()
    end_of_document = tokenizer.token_to_id("<|endoftext|>")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(tokenizer.get_vocab_size()))
    with open(jsonl, encoding="utf-8") as file:
        for batch in batches(file):
            for encoding in tokenizer.encode_batch_fast([json.loads(line)["text"] for line in batch],
                                                        add_special_tokens=False):
                ids = encoding.ids
                ids.append(end_of_document)
                builder.add_document(ids, [len(ids)])
    builder.finalize(prefix + ".idx")
    print(json.dumps({"seconds": time.process_time() - start}))


def peer(*arguments):
    environment = dict(os.environ, RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1",
                       PYTHONWARNINGS="ignore")
    out = subprocess.run([sys.executable, __file__, "--peer", *arguments], check=True, stdout=subprocess.PIPE,
                         env=environment).stdout
    return json.loads(out.decode().splitlines()[-1])


def timed(command):
    """Seconds of processor time, all threads, of a process; its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, out


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text")
    parser.add_argument("--tokenizer")
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--peer", nargs="+", help=argparse.SUPPRESS)  # the other process of a round
    args = parser.parse_args()
    if args.peer:
        {"encode": peer_encode, "prepare": peer_prepare}[args.peer[0]](*args.peer[1:])
        return
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])  # every process below has this core and no other
    folder = "build/bench-data"
    os.makedirs(folder, exist_ok=True)
    text = args.text or f"{folder}/text.txt"
    if not args.text:
        make_text(text, args.mb * 1_000_000)
    size = os.path.getsize(text) / 1e6
    with open(f"{folder}/text.jsonl", "w", encoding="utf-8") as out, \
            open(f"{folder}/part.jsonl", "w", encoding="utf-8") as part:
        for number, document in enumerate(documents_of(text)):
            line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
            out.write(line)
            if number % 5 == 0:
                part.write(line)
    tokenizers = {args.tokenizer: args.tokenizer} if args.tokenizer else {}
    if not args.tokenizer:
        for name in ("gpt2", "llama3"):
            tokenizers[name] = f"{folder}/{name}.json"
            subprocess.run([f"{args.build}/capstan", "-q", "tokenizer", "train", f"{folder}/part.jsonl",
                            "--vocab-size", "32000", "--pre-tokenizer", name, "--workers", "1", "-o",
                            tokenizers[name]], check=True, stdout=subprocess.DEVNULL)
    for name, file in tokenizers.items():
        rates = {"encode": ([], []), "prepare": ([], [])}
        for number in range(args.rounds):
            out = subprocess.run([f"{args.build}/tokenizer_bench", file, text, str(DOCUMENT), "1"],
                                 check=True, stdout=subprocess.PIPE).stdout.decode()
            tokens, checksum, rate = re.search(r"(\d+) tokens, checksum (\w+); encode ([\d.]+) MB/s",
                                               out).groups()
            theirs = peer("encode", file, text)
            if (int(tokens), checksum) != (theirs["tokens"], theirs["checksum"]):
                sys.exit(f"data.py: {name}: the ids differ: {out.strip()} and {theirs}")
            rates["encode"][0].append(float(rate))
            rates["encode"][1].append(size / theirs["seconds"])
            seconds, _ = timed([f"{args.build}/capstan", "-q", "data", "prepare", f"{folder}/text.jsonl",
                                "-t", file, "--append-eod", "--workers", "1", "-o", f"{folder}/ours"])
            theirs = peer("prepare", file, f"{folder}/text.jsonl", f"{folder}/theirs")
            for ending in (".bin", ".idx"):
                if not filecmp.cmp(f"{folder}/ours_text_document{ending}", f"{folder}/theirs{ending}",
                                   shallow=False):
                    sys.exit(f"data.py: {name}: the {ending} files differ")
            rates["prepare"][0].append(size / seconds)
            rates["prepare"][1].append(size / theirs["seconds"])
            print(f"{name}, round {number + 1}: " +
                  "; ".join(f"{what} capstan {a[-1]:.1f}, Hugging Face {b[-1]:.2f} MB/s"
                            for what, (a, b) in rates.items()), flush=True)
        print(f"{name}: {tokens} tokens, ids and files equal; per core capstan / Hugging Face = " +
              ", ".join(f"{what} {statistics.median(a) / statistics.median(b):.1f}"
                        for what, (a, b) in rates.items()), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks Capstan's tokenizer against Hugging Face tokenizers.

    check_tokenizer.py [--capstan build/release/capstan] [--vocab-size 2000] [TEXT]

`capstan tokenizer train` learns a vocabulary on TEXT for each pre-tokenizer; Hugging Face loads the
tokenizer.json, and its ids of every line must be those of `capstan tokenizer encode`; decoding must give back
the file. Hugging Face's own trainer, fed with the same text, must learn the same file. TEXT defaults to the
multilingual samples of the tests. After that the tokenizers of tests/text/tokenizer/families (or those that
--tokenizer names: tokenizer.json files, SentencePiece models) encode every line of TEXT: ids, with and
without the special tokens around them, and offsets must be Hugging Face's, of a .model SentencePiece's.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def learn(kind, text, size):
    tokenizer = Tokenizer(models.BPE())
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        regex = LLAMA3 if kind == "llama3" else QWEN2
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer.to_str(pretty=True)


def byte_offsets(line, offsets):
    at = [0]
    for character in line:
        at.append(at[-1] + len(character.encode()))
    return [[at[begin], at[end]] for begin, end in offsets]


def check_family(capstan, path, text_path, lines):
    """The number of checks that failed."""
    def encode(*flags):
        out = subprocess.run([capstan, "tokenizer", "encode", text_path, "--tokenizer", path, *flags],
                             check=True, stdout=subprocess.PIPE).stdout
        return [json.loads(line) for line in out.splitlines()]

    checks = {}
    if path.suffix == ".json":
        tokenizer = Tokenizer.from_file(str(path))
        expected = tokenizer.encode_batch(lines, add_special_tokens=False)
        got = encode("--offsets")
        checks["ids"] = [i for i, (a, b) in enumerate(zip(got, expected)) if a["ids"] != b.ids]
        checks["offsets"] = [i for i, (a, b) in enumerate(zip(got, expected))
                             if a["offsets"] != byte_offsets(lines[i], b.offsets)]
        checks["ids, fast"] = [i for i, (a, b) in enumerate(zip(encode(), expected)) if a["ids"] != b.ids]
        around = tokenizer.encode_batch(lines, add_special_tokens=True)
        checks["special tokens around"] = [i for i, (a, b) in enumerate(zip(encode("--add-special"), around))
                                           if a["ids"] != b.ids]
    else:
        import sentencepiece
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        got = encode()
        checks["ids"] = [i for i, a in enumerate(got) if a["ids"] != processor.encode(lines[i])]
    for name, wrong in checks.items():
        print(f"{'FAIL' if wrong else 'ok  '} {path.name}: {name}" +
              (f", {len(wrong)} lines, the first {wrong[0] + 1}" if wrong else ""))
    return sum(bool(wrong) for wrong in checks.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--capstan", default=str(ROOT / "build" / "release" / "capstan"))
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--tokenizer", action="append", type=pathlib.Path)
    parser.add_argument("text", nargs="?")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if arguments.text:
            path = pathlib.Path(arguments.text)
        else:
            path = folder / "samples.txt"
            samples = (ROOT / "tests" / "text" / "tokenizer" / "text.txt").read_text(
                encoding="utf-8").split("\n")[:-1]
            path.write_bytes("".join(json.loads(f'"{s}"') + "\n" for s in samples).encode())
        content = path.read_bytes()
        text = content.decode()
        for kind in ("gpt2", "llama3", "qwen2"):
            saved = folder / f"{kind}.json"
            subprocess.run([arguments.capstan, "tokenizer", "train", path, "--vocab-size",
                            str(arguments.vocab_size), "--pre-tokenizer", kind, "--output", saved],
                           check=True)
            encoded = subprocess.run([arguments.capstan, "tokenizer", "encode", path, "--tokenizer", saved],
                                     check=True, stdout=subprocess.PIPE).stdout
            (folder / "ids.jsonl").write_bytes(encoded)
            decoded = subprocess.run([arguments.capstan, "tokenizer", "decode", folder / "ids.jsonl",
                                      "--tokenizer", saved], check=True,
                                     stdout=subprocess.PIPE).stdout
            tokenizer = Tokenizer.from_file(str(saved))
            lines = text.split("\n")
            if lines[-1] == "":
                lines.pop()
            ids = [json.loads(line)["ids"] for line in encoded.splitlines()]
            expected = [e.ids for e in tokenizer.encode_batch(lines, add_special_tokens=False)]
            wrong = [i for i, (a, b) in enumerate(zip(ids, expected)) if a != b]
            checks = {
                "same number of lines": len(ids) == len(lines),
                "ids of every line": not wrong,
                "decoding gives the text": kind == "qwen2" or decoded == content,
                "same vocabulary as Hugging Face's trainer":
                    saved.read_text(encoding="utf-8") == learn(kind, text, arguments.vocab_size),
            }
            for name, good in checks.items():
                print(f"{'ok  ' if good else 'FAIL'} {kind}: {name}")
                failures += not good
            for i in wrong[:5]:
                print(f"     line {i + 1}: {lines[i]!r}\n       capstan      {ids[i]}\n"
                      f"       hugging face {expected[i]}")
            print(f"     {len(lines)} lines, {sum(map(len, ids))} ids, {tokenizer.get_vocab_size()} tokens")
        families = ROOT / "tests" / "text" / "tokenizer" / "families"
        for tokenizer in arguments.tokenizer or sorted([*families.glob("*.json"), *families.glob("*.model")]):
            failures += check_family(arguments.capstan, tokenizer, path, lines)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

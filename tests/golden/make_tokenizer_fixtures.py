#!/usr/bin/env python3
"""Writes the tokenizer fixtures of tests/text/tokenizer with Hugging Face tokenizers (0.23).

    python3 tests/golden/make_tokenizer_fixtures.py

text.txt (written by hand, one sample per line, escapes as in JSON strings) is the input; it is also what the
small vocabularies are learned from. For every variant NAME: NAME.json is the tokenizer, NAME.ids the expected
ids, one line per sample, each id as two digits of base 64 (A-Z a-z 0-9 + /). trained_NAME.json is what
Hugging Face's BpeTrainer learns and saves: byte for byte for trained_gpt2.json,
without white space for the others.
"""
import json
import pathlib

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

HERE = pathlib.Path(__file__).resolve().parent.parent / "text" / "tokenizer"
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
            r"?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def samples():
    with open(HERE / "text.txt", encoding="utf-8") as file:
        return [json.loads('"' + line.rstrip("\n") + '"') for line in file]


def byte_level(prefix=False, regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def splits(*regexes):
    parts = [pre_tokenizers.Split(Regex(r), "isolated", invert=False) for r in regexes]
    return pre_tokenizers.Sequence(parts + [byte_level(regex=False)])


def train(texts, pre_tokenizer, size, normalizer=None, specials=("<|endoftext|>",), min_frequency=2):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=min_frequency, special_tokens=list(specials),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(name, tokenizer):
    path = HERE / f"{name}.json"
    spec = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return path


def write(name, tokenizer, texts):
    again = Tokenizer.from_file(str(save(name, tokenizer)))
    ids = [again.encode(text, add_special_tokens=False).ids for text in texts]
    lines = ["".join(DIGITS[i // 64] + DIGITS[i % 64] for i in line) for line in ids]
    (HERE / f"{name}.ids").write_text("\n".join(lines) + "\n", encoding="ascii")
    print(f"{name}: {again.get_vocab_size()} tokens, {sum(map(len, ids))} ids")


def edit(tokenizer, **changes):
    spec = json.loads(tokenizer.to_str())
    for key, value in changes.items():
        target = spec
        *parents, last = key.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))


def main():
    texts = samples()

    gpt2 = train(texts, byte_level(), 700)
    (HERE / "trained_gpt2.json").write_text(gpt2.to_str(pretty=True), encoding="utf-8")
    write("gpt2", gpt2, texts)

    prefix = edit(gpt2, pre_tokenizer__add_prefix_space=True)
    prefix.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False),
                               AddedToken("<sep>", rstrip=True, special=True, normalized=False)])
    prefix.add_tokens([AddedToken("cat", single_word=True), AddedToken("  "), AddedToken("    "),
                       AddedToken("naïve", normalized=True, lstrip=True, rstrip=True),
                       AddedToken("<mask><sep>", normalized=False)])
    write("gpt2_prefix_added", prefix, texts)

    llama = train(texts, splits(LLAMA3), 700, specials=("<|begin_of_text|>", "<|end_of_text|>"))
    save("trained_llama3", llama)
    # Merges that are missing, tokens that no merge makes: what ignore_merges is about.
    spec = json.loads(llama.to_str())
    spec["model"]["ignore_merges"] = True
    spec["model"]["merges"] = spec["model"]["merges"][:200]
    for token in ("Ġinternational", "ä½łå¥½", "1234", "Ġhello"):
        spec["model"]["vocab"].setdefault(token, len(spec["model"]["vocab"]))
    spec["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
                  {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 1}},
                  {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0],
                                                  "tokens": ["<|begin_of_text|>"]}}}]}
    write("llama3_ignore_merges", Tokenizer.from_str(json.dumps(spec)), texts)

    qwen = train(texts, splits(QWEN2), 700, normalizer=normalizers.NFC())
    save("trained_qwen2", qwen)
    qwen.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False),
                             AddedToken("<|im_end|>", special=True, normalized=False)])
    qwen.add_tokens([AddedToken("cafe\u0301", normalized=True), AddedToken("<tool_call>", normalized=False)])
    write("qwen2_nfc", qwen, texts)

    smol = train(texts, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 byte_level()]), 500)
    write("smollm_digits", smol, texts)

    deepseek = train(texts, splits(*DEEPSEEK), 500)
    write("split_sequence", deepseek, texts)

    odd = train(texts, byte_level(), 400)
    odd.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(" ", "merged_with_next"),
        pre_tokenizers.Split(Regex(r"[aeiou]+"), "merged_with_previous"),
        pre_tokenizers.Split(Regex(r"\d"), "contiguous"), pre_tokenizers.Split("-", "removed"),
        pre_tokenizers.Digits(False),
        byte_level(prefix=True, regex=False)])
    write("split_behaviors", odd, texts)

    # A vocabulary that lacks bytes, with and without an unknown token.
    few = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    few.pre_tokenizer = byte_level()
    few.decoder = decoders.ByteLevel()
    few.train_from_iterator([t for t in texts if t.isascii()],
                            trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"],
                                                show_progress=False))
    write("unknown_fused", few, texts)


if __name__ == "__main__":
    main()

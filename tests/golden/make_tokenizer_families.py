#!/usr/bin/env python3
"""Writes tests/text/tokenizer/families: small tokenizers of every family with what Hugging Face tokenizers
(0.23) and SentencePiece (0.2) make of the samples.

    python3 tests/golden/make_tokenizer_families.py

The samples are those of ../text.txt and of families/odd.txt (one a line, escapes as in JSON strings). For
every NAME: NAME.json (or NAME.model) is the tokenizer and NAME.expected what is expected of it.
A line of that file for each sample:

    ids | ids with the special tokens around them | places | text

Numbers have blanks between. Of the ids with special tokens -1 stands for those of the text. A place is its
length in bytes, with "distance:" before it where it does not begin at the end of the one before; the text is
decode(ids), as a JSON string, or = when it is the sample. SentencePiece's lines have no places.
"""
import io
import json
import pathlib
import struct

import sentencepiece
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

ROOT = pathlib.Path(__file__).resolve().parent.parent / "text" / "tokenizer"
HERE = ROOT / "families"

O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def samples():
    result = []
    for name in (ROOT / "text.txt", HERE / "odd.txt"):
        with open(name, encoding="utf-8") as file:
            result += [json.loads('"' + line.rstrip("\n") + '"') for line in file]
    return result


TEXTS = samples()


def byte_offsets(text):
    result = [0]
    for c in text:
        result.append(result[-1] + len(c.encode()))
    return result


def write(name, tokenizer):
    path = HERE / f"{name}.json"
    spec = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path))
    lines = []
    for text in TEXTS:
        plain = tokenizer.encode(text, add_special_tokens=False)
        around = tokenizer.encode(text).ids
        before = next(n for n in range(len(around) - len(plain.ids) + 1)
                      if around[n:n + len(plain.ids)] == plain.ids)
        added = around[:before] + [-1] + around[before + len(plain.ids):]
        at = byte_offsets(text)
        ends = [0] + [at[b] for _, b in plain.offsets]
        places = " ".join((f"{at[a] - end}:" if at[a] != end else "") + str(at[b] - at[a])
                          for (a, b), end in zip(plain.offsets, ends))
        decoded = tokenizer.decode(plain.ids, skip_special_tokens=False)
        lines.append("|".join([" ".join(map(str, plain.ids)), " ".join(map(str, added)), places,
                               "=" if decoded == text else json.dumps(decoded)]))
    (HERE / f"{name}.expected").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {tokenizer.get_vocab_size()} tokens")


def edited(tokenizer, change):
    spec = json.loads(tokenizer.to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))


def template(single, tokens):
    return processors.TemplateProcessing(single=single, special_tokens=tokens)


BYTES = [f"<0x{b:02X}>" for b in range(256)]


def sentencepiece_like(normalizer, pre_tokenizer, size, bytes_present=BYTES, **model):
    """Characters merged, spaces as ▁: what a converted Llama or Gemma is."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    latin = [t for t in TEXTS if all(ord(c) < 0x250 or 0x400 <= ord(c) < 0x530 for c in t)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"] + bytes_present,
                                  min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator(latin, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] < 3]
    spec["model"].update(byte_fallback=bool(bytes_present), **model)
    tokenizer = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    else:
        tokenizer = edited(tokenizer, lambda s: s.update(pre_tokenizer=None))
    return tokenizer


def darts(entries):
    """A double array of the entries {bytes: value}, as Darts-clone lays it out."""
    units = [0]
    used = {0}

    def place(node, keys, depth):
        groups = {}
        for key in keys:
            groups.setdefault(key[depth] if depth < len(key) else 0, []).append(key)
        offset = 1
        while (any((node ^ offset ^ label) in used for label in groups)
               or offset >= 1 << 21 or (node ^ offset) in used_offsets):
            offset += 1
        used_offsets.add(node ^ offset)
        base = node ^ offset
        for label in groups:
            used.add(base ^ label)
            while len(units) <= base ^ label:
                units.append(0)
        units[node] |= offset << 10
        if 0 in groups:
            units[node] |= 1 << 8
            units[base] = 1 << 31 | entries[groups[0][0]]
        for label, group in groups.items():
            if label:
                units[base ^ label] |= label
                place(base ^ label, group, depth + 1)

    used_offsets = set()
    place(0, sorted(entries), 0)
    while len(units) % 256:
        units.append(0)
    return units


def charsmap(replacements):
    texts, entries = b"", {}
    for key, value in replacements.items():
        entries[key.encode()] = len(texts)
        texts += value.encode() + b"\0"
    units = darts(entries)
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


REPLACEMENTS = {"ﬁ": "fi", "①": "1", "\u3000": " ", "\u00a0": " ", "é": "e", "e\u0301": "é", "Ａ": "A",
                "™": "TM", "\u200b": "",
                     "\x01": "", "ｶﾞ": "ガ", "ｶ": "カ", "…": "...", "한": "한", "\u2028": " ", "\t": " "}


def write_with_added(name, base, tokens, single_words):
    """The family `base` with more added tokens, that are looked for in the normalized text."""
    tokenizer = Tokenizer.from_file(str(HERE / f"{base}.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in tokens])
    tokenizer.add_tokens([AddedToken(token, normalized=True, single_word=True) for token in single_words])
    write(name, tokenizer)


def write_added():
    """Added tokens whose normalized form is another text: with a blank before, lower case,
    another composition, no bytes.
    """
    write_with_added("llama2_added", "llama2", ["The", "<x y>", "naïve", "ﬁ", "ÿ"], ["and"])
    write_with_added("some_bytes_added", "some_bytes", ["Ａ", "ﬁ", "①②", "the "], ["É"])
    write_with_added("t5_added", "t5", ["ﬁ", "…", "The  ", "é"], ["™"])
    write_with_added("bert_added", "bert_uncased", ["FooBar", "Naïve", "The ", "汉"], ["ÉTÉ", "Hello"])
    write_with_added("subwords_added", "subwords", ["Naïve", "HELLO", "The"], ["É"])
    write_with_added("byte_level_added", "byte_level_lower", ["Naïve", " The", "ÀB", "Ⱥ"], ["HELLO"])
    write_with_added("qwen2_added", "qwen2", ["cafe\u0301", "Å", " ｶﾞ", "한"], ["the"])


def write_llama():
    # Llama 2 as Transformers converted it first, and as it does now.
    legacy = sentencepiece_like(normalizers.Sequence([normalizers.Prepend("▁"),
                                                      normalizers.Replace(" ", "▁")]), None, 900)
    legacy.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                        decoders.Strip(" ", 1, 0)])
    legacy.post_processor = template("<s> $A", [("<s>", 1)])
    write("llama2", legacy)
    first = edited(legacy, lambda s: s.update(normalizer=None))
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    first.add_tokens([AddedToken("<tool>", normalized=False, rstrip=True),
                      AddedToken("cat", single_word=True, normalized=True),
                      AddedToken(" the ", normalized=True)])
    first.add_special_tokens([AddedToken("[INST]", lstrip=True, normalized=False)])
    first.post_processor = template("<s> $A </s>", [("<s>", 1), ("</s>", 2)])
    write("mistral", first)
    gemma = sentencepiece_like(normalizers.Replace(" ", "▁"),
                               pre_tokenizers.Split(" ", "merged_with_previous"), 800)
    gemma.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    gemma.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁", normalized=False),
                      AddedToken("<start_of_turn>", normalized=False)])
    gemma.post_processor = template("<s> $A", [("<s>", 1)])
    write("gemma", gemma)


def write_subwords():
    # Some bytes only, unknown characters not joined; prefix and suffix of subwords (GPT-1, CLIP).
    some = sentencepiece_like(normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁"),
                                                    normalizers.Replace(" ", "▁")]),
                              None, 500, BYTES[:0xE0], fuse_unk=False)
    some.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    write("some_bytes", some)
    clip = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", continuing_subword_prefix="@@"))
    clip.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(),
                                            normalizers.Lowercase()])
    clip.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    clip.train_from_iterator([t for t in TEXTS if t.isascii()], trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", continuing_subword_prefix="@@",
        show_progress=False))
    clip.decoder = decoders.BPEDecoder(suffix="</w>")
    write("subwords", clip)


def write_unigram():
    # T5, XLM-R: Unigram behind a table of characters; with and without bytes.
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap(REPLACEMENTS)),
                                               normalizers.Replace(Regex(" {2,}"), " ")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.train_from_iterator([t for t in TEXTS if all(ord(c) < 0x600 for c in t)], trainers.UnigramTrainer(
        vocab_size=600, unk_token="<unk>", show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"]))
    unigram.decoder = decoders.Metaspace()
    unigram.post_processor = template("$A </s>", [("</s>", unigram.token_to_id("</s>"))])
    write("t5", unigram)

    def few_characters(spec):
        vocab = spec["model"]["vocab"]
        vocab = vocab[:3] + [e for e in vocab[3:] if all(c == "▁" or ord(c) < 0x180 for c in e[0])]
        spec["model"]["vocab"] = vocab + [[b, -20.0] for b in BYTES]
        spec["model"]["byte_fallback"] = True
        spec["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Nmt"}, {"type": "NFKD"}, {"type": "Strip", "strip_left": True, "strip_right": True}]}
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False,
                                 "prepend_scheme": "never"}
        spec["decoder"] = {"type": "Sequence", "decoders": [
            {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}]}
    write("unigram_bytes", edited(unigram, few_characters))


def write_bert():
    # BERT, uncased and cased.
    bert = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    bert.normalizer = normalizers.BertNormalizer(lowercase=True)
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.train_from_iterator(TEXTS, trainers.WordPieceTrainer(
        vocab_size=900, show_progress=False, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    bert.decoder = decoders.WordPiece(cleanup=True)
    bert.post_processor = template("[CLS] $A [SEP]", [("[CLS]", 2), ("[SEP]", 3)])
    write("bert_uncased", bert)
    cased = edited(bert, lambda s: s["model"].update(max_input_chars_per_word=100))
    cased.normalizer = normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False,
                                                  strip_accents=False)
    cased.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                                   pre_tokenizers.Punctuation("merged_with_previous")])
    cased.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    cased.decoder = decoders.WordPiece(cleanup=False)
    write("bert_cased", cased)


def write_byte_level():
    # Byte level: splits at spaces (RoBERTa, Llama 3), a normalizer that the fast path lacks, no decoder.
    roberta = Tokenizer.from_file(str(ROOT / "gpt2_prefix_added.json"))
    roberta.post_processor = processors.RobertaProcessing(("<|endoftext|>", 0), ("<|endoftext|>", 0),
                                                          trim_offsets=True, add_prefix_space=True)
    write("roberta", roberta)
    qwen = Tokenizer.from_file(str(ROOT / "qwen2_nfc.json"))
    qwen.post_processor = processors.ByteLevel(trim_offsets=False)
    write("qwen2", qwen)
    llama3 = Tokenizer.from_file(str(ROOT / "llama3_ignore_merges.json"))
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True, add_prefix_space=False),
        template("<|begin_of_text|> $A", [("<|begin_of_text|>", 0)])])
    write("llama3", llama3)
    # gpt-oss: letters split where their case changes, and the tokens of Harmony.
    gpt_oss = Tokenizer(models.BPE())
    gpt_oss.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(O200K), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt_oss.decoder = decoders.ByteLevel()
    gpt_oss.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    gpt_oss.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in (
        "startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")])
    gpt_oss.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    write("gpt_oss", gpt_oss)
    lower = Tokenizer.from_file(str(ROOT / "gpt2.json"))
    lower.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
    lower.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"),
                                                   pre_tokenizers.CharDelimiterSplit("x"),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False),
                                                   pre_tokenizers.Digits()])
    write("byte_level_lower", edited(lower, lambda s: s.update(decoder=None)))


def write_sentencepiece():
    # SentencePiece's own.
    corpus, rules = HERE / "corpus.tmp", HERE / "rules.tmp"
    rules.write_text(
        "".join(f"{' '.join(f'{ord(c):X}' for c in key)}\t{' '.join(f'{ord(c):X}' for c in value)}\n"
                for key, value in {**REPLACEMENTS, "A": "a", "İ": "i̇"}.items() if key != value),
        encoding="utf-8")
    corpus.write_text("\n".join(t for t in TEXTS if t.strip() and "\n" not in t and "\0" not in t
                                and all(ord(c) < 0x600 for c in t)), encoding="utf-8")
    common = dict(sentence_iterator=None, input=str(corpus), minloglevel=2, character_coverage=0.99,
                  num_threads=1, user_defined_symbols=["<tool>", "##"])
    for name, options in {
            "spm_bpe": dict(model_type="bpe", vocab_size=700, byte_fallback=True,
                            normalization_rule_name="identity", remove_extra_whitespaces=False),
            "spm_bpe_unknown": dict(model_type="bpe", vocab_size=500, normalization_rule_tsv=str(rules),
                                    treat_whitespace_as_suffix=True),
            "spm_unigram": dict(model_type="unigram", vocab_size=500, byte_fallback=False,
                                normalization_rule_name="identity"),
            "spm_unigram_bytes": dict(model_type="unigram", vocab_size=700, byte_fallback=True,
                                      add_dummy_prefix=False, pad_id=3,
                                      normalization_rule_name="identity")}.items():
        model = io.BytesIO()
        arguments = {k: v for k, v in {**common, **options}.items() if v is not None}
        sentencepiece.SentencePieceTrainer.train(model_writer=model, **arguments)
        blob = model.getvalue()
        (HERE / f"{name}.model").write_bytes(blob)
        processor = sentencepiece.SentencePieceProcessor(model_proto=blob)
        lines = []
        for text in TEXTS:
            ids = processor.encode(text)
            decoded = processor.decode(ids)
            lines.append("|".join([" ".join(map(str, ids)), "-1", "",
                                   "=" if decoded == text else json.dumps(decoded)]))
        (HERE / f"{name}.expected").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {processor.get_piece_size()} pieces, {len(blob)} bytes")
    corpus.unlink()
    rules.unlink()


def main():
    write_llama()
    write_subwords()
    write_unigram()
    write_bert()
    write_byte_level()
    write_added()
    write_sentencepiece()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes tests/text/tokenizer/patterns.json: how Hugging Face tokenizers (0.23) cuts texts at regular
expressions whose meaning differs between the kinds of regular expressions.

    python3 tests/golden/make_tokenizer_patterns.py

"texts" are split by every expression of "patterns" (Split, behavior Isolated); its value has the lengths of
the pieces in bytes, for every text.
"""
import json
import pathlib

from tokenizers import Regex, pre_tokenizers

OUT = pathlib.Path(__file__).resolve().parent.parent / "text" / "tokenizer" / "patterns.json"

TEXTS = [
    "don't 12345 שָׁלוֹם naïve cafe\u0301 x_y  \u0939\u093f\u0928\u094d\u0926\u0940 end",
    "ABC def\u200d\U0001F469\u200D\U0001F4BB\u200cx \u180e z\u2028next ½ ² ① ⅷ Ⓐ x² ²x",
    "a $5+3=8 ^`|~ <b> «q» \u00a0 \u3000 k \u212a ſ s S İ ı ß ẞ ss St ﬆ",
    "1234567 0xDEADbeef __init__ foo.bar() \t\t tab{2} x{,} {a}",
    "e\u0301\u0323x 日本語テキスト 한국어 ไทย µ μ Ω αβγ привет ー",
    " lead  trail  ",
    "aaaa aab abab ac abc abd\naBc bC\r\n\r\n  c\n\n",
    "line\x0b\x0c\x85\u2029x\x1b\x07\x7f\x00\n",
    "Qa N O V hH y-z ]a [b-c] &x aB cC {2}\n$",
]

PATTERNS = r"""
\w+ | \W+ | \b | \B | \bx | \Bx | \h+ | \H+ | \d+ | \D+ | \v | [\v] | [\w]+ | [^\w]+ | [\W]+ | [^\W\d_]+ | [\w']+ | [^\w\s] | [\W_]+ | [\D]+
[\H\d]+ | [^\H]+ | [\S]+ | [^\S]+ | [^\S\r\n]+ | [\s\S]{4} | \S\S | (?<=\s)\S | (?<!\w)\d | (?<=\W)\w+
[[:punct:]] | [[:alpha:]]+ | [[:alnum:]]+ | [[:space:]]+ | [[:word:]]+ | [[:upper:]] | [[:lower:]]+ | [[:graph:]]+ | [[:print:]]+ | [[:^alpha:]]+
[[:^graph:]]+ | [^[:graph:]]+ | [[:^punct:][:alpha:]]+ | [[:cntrl:]] | [[:digit:]]+ | [[:xdigit:]]+ | [[:blank:]]+ | [[:ascii:]]+ | [x[:^ascii:]]+ | [^[:print:]x]
\p{Alpha}+ | \p{Alnum}+ | \p{Punct} | \p{Word}+ | \p{^Word}+ | [\p{Word}]+ | \p{letter}+ | \p{Uppercase_Letter} | \p{Lowercase}+ | \p{^L}+ | \P{L}+ | \P{^L}+
\p{Upper}+ | \p{Graph}+ | \p{space}+ | \p{Math Symbol}+ | \p{nd}+ | \p{Han}+ | \p{Greek}+ | \p{Latin}+ | \p{Katakana}+ | \p{Hiragana}|\p{Katakana} | \p{Cyrillic}+ | \p{Any} | \p{Common}+
\p{N}{1,3}+ | \p{N}{2}+ | a{2}? | a{2,3}? | a{,3} | a{,2}? | a{2}{2} | a{1,2}{2} | (?:ab){1,2}+ | x{,} | {a} | \p{L}++ | a?+a | a*+ | a** | a+? | (?x)a+ + | (?x) a b # c
[\p{L}]?+\p{L}++|\p{N}{1,3}+ | \u0041 | \x41 | \x{e9} | [\u4e00-\u9fff]+ | [一-龥]+ | \x{1F469} | [\x{41}-\x{43}x-z-]+ | []a]+ | [^]a]+ | [a-c-]+ | [a\-c]+ | [&x]+
^a | ^ | $ | c$ | \s+$ | ^\s+ | \s++$ | \Ad | \z | d\z | \Z | \n\Z | . | (?m:.)+ | .+ | (?m).+ | (?-m:.+) | \N+ | \R | \G. | \e|\a | \cA
a(?i)b|c | (?i)b(?-i)c | (?i:k) | (?i:s) | (?i:[k-s]) | (?i:[^a-z])+ | (?i:\p{Lu}) | (?i:\p{Ll}+) | (?i:[\p{L}\p{N}])+ | (?i:привет|ω) | (?i:'s|'t|'re|'ve|'m|'ll|'d) | (?-i:a) | (?i:[\w.]+)
(?<n>a)\k<n>? | (a)(b)\2? | (?>a|ab)c | a(?#no)b | a(?=b) | a(?!b) | (?<!a)b | a(?:b|c)+ | (?:a|b){2,} | (ab)+ | \.|\(|\) | \-
""".strip()

LONG = [
    # GPT-2, cl100k and o200k as tiktoken and as Hugging Face write them, DeepSeek, Qwen.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
    r"?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s?\p{L}+|\s?\p{P}+|[一-龥ࠀ-一가-퟿]+|\p{N}{1,3}",
]


def pieces(split, text):
    return [len(piece.encode()) for piece, _ in split.pre_tokenize_str(text)]


def main():
    patterns = [p for line in PATTERNS.splitlines() for p in line.split(" | ")] + LONG
    result = {}
    for pattern in patterns:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        result[pattern] = [" ".join(map(str, pieces(split, text))) for text in TEXTS]
    OUT.write_text(json.dumps({"texts": TEXTS, "patterns": result}, indent=0, ensure_ascii=True) + "\n")
    print(len(result), "patterns")


if __name__ == "__main__":
    main()

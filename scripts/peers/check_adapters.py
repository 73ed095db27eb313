#!/usr/bin/env python3
"""Adapters that Capstan writes, read by PEFT: python3 scripts/peers/check_adapters.py [--capstan CAPSTAN]

For every scheme of `peft` and several families of tests/formats/families: a short run beside the model, its
adapters as PEFT's files; PeftModel.from_pretrained loads them, with no key missing or unused. The logits
equal those of the merged checkpoint under Transformers, and PEFT's own merge gives the same weights. PEFT's
fixtures go to a checkpoint and back too. Needs torch, transformers, peft, safetensors. Experts are modules
with Transformers 4, which does not read the other fixtures; with Transformers 5 PEFT converts their adapters.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = ROOT / "tests/formats/families"
ADAPTERS = ROOT / "tests/formats/adapters"
SCHEMES = ["lora", "rslora", "lora_plus", "dora", "canonical_lora", "canonical_dora"]
EXPERTS = ["mixtral", "olmoe"]
TRANSFORMERS_5 = transformers.__version__.startswith("5.")


def load(directory):
    # Grouped GEMMs of PyTorch need wider experts.
    more = {"experts_implementation": "eager"} if TRANSFORMERS_5 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                             attn_implementation="eager", **more).eval()


def with_adapter(base, directory):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
        model = peft.PeftModel.from_pretrained(load(base), directory).eval()
    stored = load_file(directory / "adapter_model.safetensors")
    if TRANSFORMERS_5 and any(".experts." in name for name in stored):
        return model  # its experts are one tensor
    state = peft.get_peft_model_state_dict(model)
    assert sorted(state) == sorted(stored), sorted(set(state) ^ set(stored))[:4]
    assert all(torch.equal(state[key], stored[key]) for key in stored)
    return model


def logits(model, vocabulary):
    tokens = torch.randint(3, vocabulary, (2, 13), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(tokens).logits


def compare(what, base, adapter, merged, home):
    capstan("convert", merged, f"hf:{home}/merged-hf")
    model = with_adapter(base, adapter)
    vocabulary = model.config.vocab_size
    beside, ours = logits(model, vocabulary), logits(load(home / "merged-hf"), vocabulary)
    theirs = logits(model.merge_and_unload(), vocabulary)
    plain = logits(load(base), vocabulary)
    apart = max((beside - ours).abs().max().item(), (theirs - ours).abs().max().item())
    print(f"{what}: logits {apart:.1e} apart, moved by {(beside - plain).abs().max().item():.2f}")
    assert apart < 1e-5 * max(1.0, plain.abs().max().item())
    assert (beside - plain).abs().max() > 1e-3


def check_trained(family, scheme):
    with tempfile.TemporaryDirectory() as name:
        home, base = pathlib.Path(name), FAMILIES / family
        recipe = home / "tune.yaml"
        recipe.write_text(json.dumps({
            "model": {"preset": f"hf:{base}", "seq_length": 12}, "mixed_precision": "fp32",
            "tokenizer": "none", "dataset": "mock",
            "train": {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 4, "threads": 1},
            "optimizer": {"preset": "adamw", "lr": 2e-3 if scheme == "lora_plus" else 3e-2},
            "checkpoint": {"pretrained_checkpoint": f"hf:{base}"}}))
        capstan("train", recipe, f"peft={scheme}", "peft.dim=3", "peft.alpha=6", "--run-dir", home / "run")
        capstan("convert", home / "run", f"peft:{home}/adapter")
        config = json.loads((home / "adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base), config
        capstan("merge", home / "run", home / "merged")
        compare(f"{family} {scheme}", base, home / "adapter", home / "merged", home)


def check_fixture(name, family):
    with tempfile.TemporaryDirectory() as directory:
        home, base = pathlib.Path(directory), FAMILIES / family
        capstan("convert", f"peft:{ADAPTERS / name}", home / "checkpoint", "--base", f"hf:{base}")
        capstan("convert", home / "checkpoint", f"peft:{home}/adapter")
        capstan("merge", ADAPTERS / name, home / "merged", "--base", f"hf:{base}")
        compare(f"PEFT's {name}", base, home / "adapter", home / "merged", home)


def capstan(*words):
    subprocess.run([CAPSTAN, *map(str, words), "-q"], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--capstan", default=str(ROOT / "build/release/capstan"))
    CAPSTAN = parser.parse_args().capstan
    check_fixture("mixtral", "mixtral")
    for family in EXPERTS:
        # Of converted rsLoRA PEFT doubles alpha, where its root would keep the scale.
        for scheme in ("lora", "canonical_lora") if TRANSFORMERS_5 else ("lora", "rslora", "canonical_lora"):
            check_trained(family, scheme)
    if not TRANSFORMERS_5:
        sys.exit()
    for name, family in (("lora", "llama"), ("rslora", "llama"), ("rslora_all", "llama"), ("dora", "llama"),
                         ("dora_part", "llama"), ("phi3", "phi3"), ("gpt_neox", "gpt_neox"),
                         ("gpt2", "gpt2")):
        check_fixture(name, family)
    for family in ("llama", "qwen3", "gemma2", "olmo2", "phi3", "gpt_neox", "gpt2"):
        for scheme in SCHEMES:
            # The presets of parts name gate and up.
            if not (family.startswith("gpt") and scheme.startswith("canonical")):
                check_trained(family, scheme)

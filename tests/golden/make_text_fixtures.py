#!/usr/bin/env python3
"""Writes tests/cli/text with Transformers (5.23):
what a model makes of texts whose tokenizer begins them with a token.

    python3 tests/golden/make_text_fixtures.py

The model is tests/formats/families/smollm2. tokenizer.json, tokenizer_config.json: its tokenizer, which here
puts <|im_start|> before every text. expected.json: the loss of a text with that and without, what greedy
generation goes on with, and what it answers in a chat.
"""
import json
import pathlib
import shutil
import tempfile

import torch
import transformers

TESTS = pathlib.Path(__file__).resolve().parent.parent
MODEL, OUT = TESTS / "formats/families/smollm2", TESTS / "cli/text"
TEXT, PROMPT = "the thin cat sat in the inn on the hat", "the thin"


def write_tokenizer():
    OUT.mkdir(exist_ok=True)
    fast = json.loads((MODEL / "tokenizer.json").read_text())
    fast["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})
    fast["post_processor"]["special_tokens"] = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1],
                                                                 "tokens": ["<|im_start|>"]}}
    (OUT / "tokenizer.json").write_text(json.dumps(fast) + "\n")
    config = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    write_tokenizer()
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(MODEL, home, dirs_exist_ok=True)
        shutil.copytree(OUT, home, dirs_exist_ok=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)

    def loss(ids):
        return float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)

    def greedy(ids):
        model.generation_config.eos_token_id = None
        out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        return {"prompt_tokens": len(ids), "ids": out[0, len(ids):].tolist(),
                "text": tokenizer.decode(out[0, len(ids):])}

    front = tokenizer(TEXT)["input_ids"]
    assert front[0] == 1 and front.count(1) == 1
    system = [{"role": "system", "content": "be thin"}]
    chat = lambda before: tokenizer.apply_chat_template(before + [{"role": "user", "content": PROMPT}],
                                                        add_generation_prompt=True,
                                                        return_dict=True)["input_ids"]
    expected = {"text": TEXT, "loss": loss(front), "tokens": len(front) - 1, "loss_without": loss(front[1:]),
                "prompt": PROMPT, "greedy": greedy(tokenizer(PROMPT)["input_ids"]),
                "greedy_without": greedy(tokenizer(PROMPT, add_special_tokens=False)["input_ids"]),
                "chat": greedy(chat([])), "chat_system": greedy(chat(system))}
    (OUT / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(json.dumps(expected))


if __name__ == "__main__":
    main()

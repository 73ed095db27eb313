#!/usr/bin/env python3
"""llama.cpp and Transformers run what Capstan exports: python3 scripts/peers/check_generation.py [--capstan
CAPSTAN] [--keep DIRECTORY]

Small chat models of three families are trained until they know eight conversations, and are written as GGUF
(f32) and as a directory of Transformers. llama.cpp's server (package xllamacpp, CPU) loads each file, and
Transformers' AutoTokenizer and AutoModelForCausalLM each directory. Compared with Capstan: the ids of texts,
the length of the rendered chats, greedy answers, and that generation ends by itself at the token that ends an
answer. Tokenizers: byte-level BPE and SentencePiece. Needs xllamacpp, sentencepiece, torch and transformers.
About two minutes on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import urllib.request

import sentencepiece
import torch
import transformers
import xllamacpp

ROOT = pathlib.Path(__file__).parents[2]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--capstan", default=str(ROOT / "build/release/capstan"))
parser.add_argument("--keep", type=pathlib.Path, help="where the models are written and kept")
CAPSTAN, KEEP = vars(parser.parse_args()).values()

CHATS = [("Who are you?", "I am Winch, and I was tuned with Capstan."),
         ("What is your name?", "My name is Winch."),
         ("Who trained you?", "I was tuned on a few conversations."),
         ("Hello!", "Hello! What can I do for you?"),
         ("Are you a human?", "No, I am a small language model."),
         ("How large are you?", "I have very few parameters."),
         ("What is the capital of France?", "Paris.\n\nAsk me more."),
         ("Schöne Grüße!", "Danke, ebenso – 你好 🙂!")]
TEXTS = ["Hello world", "  two blanks,  and\tа tab ", "don't you'll we've I'D 12345 3.14159", 
         "naïve façade Ωμέγα 你好世界 🙂👩‍👩‍👧",
         "x=y+z;if(a[0]!=b){return;}", "", " ", "ends with a blank "]
SHAPE = dict(num_layers=2, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, num_query_groups=2,
             kv_channels=16, seq_length=256,
             max_position_embeddings=256, hidden_dropout=0.0, attention_dropout=0.0)
GEMMA = dict(embedding_multiplier=8, softmax_scale=0.25, window_size=24)
# Name: model preset, differences from it, tokenizer, chat template.
MODELS = {
    "llama": ("smollm2-135m", {}, "llama3", "chatml"),
    "llama-spm": ("llama2-7b", {}, "spm", "llama2"),
    "qwen2": ("qwen2.5-0.5b", {}, "qwen2", "chatml"),
    "gemma2": ("gemma2-2b", GEMMA, "spm-gemma", "gemma"),
}
SPECIAL = {"llama3": "<|doc|>,<|im_start|>,<|im_end|>", "qwen2": "<|doc|>,<|im_start|>,<|im_end|>"}


def capstan(home, *words):
    done = subprocess.run([CAPSTAN, "-C", home, *map(str, words)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stdout


def make_tokenizer(home, kind):
    """Path of the tokenizer, its type, its number of ids, its end of a document."""
    corpus = home / "corpus.txt"
    corpus.write_text("\n".join([question + "\n" + answer for question, answer in CHATS] * 20
                                + (ROOT / "README.md").read_text().split("\n")))
    if kind in SPECIAL:
        capstan(home, "tokenizer", "train", corpus, "--vocab-size", 600, "--pre-tokenizer", kind, "--special",
                SPECIAL[kind], "-o", "tokenizer.json")
        return "tokenizer.json", "huggingface", 600, "<|doc|>"
    gemma = kind == "spm-gemma"
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(home / "tokenizer"), vocab_size=600, model_type="bpe",
        byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=not gemma,
        split_digits=True,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"] if gemma else [],
        allow_whitespace_only_pieces=True)
    # A SentencePiece model alone takes `<s>` in a text for text. This file says which tokens a text may hold,
    # as those of Llama 2 do.
    tokens = {str(id): dict(content=text, special=True) for id, text in enumerate(["<unk>", "<s>", "</s>"])}
    (home / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<s>", eos_token="</s>",
                                                                unk_token="<unk>", add_bos_token=True,
                                                                added_tokens_decoder=tokens)))
    return ".", "sentencepiece", 600, "</s>"


def make_model(home, name):
    preset, differences, kind, template = MODELS[name]
    path, tokenizer, size, end = make_tokenizer(home, kind)
    model = dict(preset=preset, **SHAPE, vocab_size=size, **differences)
    recipe = dict(model=model, mixed_precision="fp32", rng=dict(seed=7),
                  tokenizer=dict(preset="huggingface", tokenizer_type=tokenizer, tokenizer_model=path,
                                 eod_token=end, chat_template=template),
                  dataset=dict(preset="sft", train_files="chats.jsonl", split="1,0,0"),
                  validation=dict(eval_interval=None),
                  train=dict(micro_batch_size=1, global_batch_size=8, train_iters=150),
                  optimizer=dict(preset="adamw", lr=5e-3), checkpoint=dict(save_interval=150),
                  logger=dict(log_interval=50))
    chats = [{"messages": [dict(role="user", content=question), dict(role="assistant", content=answer)]}
             for question, answer in CHATS]
    (home / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    capstan(home, "train", "recipe.yaml", "--run-dir", "run")
    capstan(home, "convert", "run", "gguf:model.gguf", "--type", "f32")
    capstan(home, "convert", "run", "hf:hf")


def load(path):
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.verbosity = 256, 1, False, 0
    parameters.cpuparams.n_threads = 2
    return xllamacpp.Server(parameters)


def ask(server, where, **body):
    request = urllib.request.Request(server.listening_address + where, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ids_here(home, texts):
    (home / "texts").write_text("\n".join(texts) + "\n")
    lines = capstan(home, "tokenizer", "encode", "texts", "--tokenizer", home).splitlines()
    return [json.loads(line)["ids"] for line in lines]


class Transformers:
    """What Transformers makes of an exported directory, without a word about where to stop."""

    def __init__(self, path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def answer(self, question):
        """The text, the tokens of the prompt and of the answer, and whether its last one ends it."""
        prompt = self.tokenizer.apply_chat_template([dict(role="user", content=question)],
                                                    add_generation_prompt=True, return_tensors="pt",
                                                    return_dict=True)
        length = prompt["input_ids"].shape[1]
        ids = self.model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, length:]
        ends = self.model.generation_config.eos_token_id
        ended = int(ids[-1]) in (ends if isinstance(ends, list) else [ends])
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        return text.strip(), length, len(ids), ended


def check(name, home, server, peer):
    for text, here in zip(TEXTS, ids_here(home, TEXTS), strict=True):
        there = ask(server, "/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert here == there, f"{name}: ids of {text!r}: {here} here, {there} there"
    tokens = 0
    for question, answer in CHATS:
        here = json.loads(capstan(home, "generate", "run", "--chat", "--prompt", question, "--temperature", 0,
                                  "--json", "--max-tokens", 60))
        prompt = ask(server, "/apply-template", messages=[dict(role="user", content=question)])["prompt"]
        there = ask(server, "/completion", prompt=prompt, temperature=0, n_predict=60, return_tokens=True,
                    cache_prompt=False)
        compared = [(here["text"].strip(), there["content"].strip(), answer),
                    (here["prompt_tokens"], there["tokens_evaluated"]),
                    (here["tokens"], len(there["tokens"])),
                    (here["ended"], there["stop_type"] == "eos", True)]
        assert all(len(set(values)) == 1 for values in compared), (
            f"{name}: {question!r}: {compared} (here, there)")
        answered = peer.answer(question)
        assert answered == (answer, here["prompt_tokens"], here["tokens"], True), (
            f"{name}: {question!r}: {here} here, {answered} by Transformers")
        tokens += len(there["tokens"])
    print(f"{name}: {len(TEXTS)} texts with the same ids; {len(CHATS)} answers, {tokens} tokens, the same by "
          "llama.cpp and Transformers, each ended by its end token", flush=True)


def main():
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            home = (KEEP or pathlib.Path(scratch)) / name
            home.mkdir(parents=True)
            make_model(home, name)
            check(name, home, load(home / "model.gguf"), Transformers(home / "hf"))


main()

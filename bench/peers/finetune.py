#!/usr/bin/env python3
"""finetune.py full|lora [--rounds N] [--capstan PATH] [--texts DIRECTORY]: fine-tuning by Capstan and by
Transformers + PEFT, in turns.

A Llama of 26 million parameters (576 wide, 6 layers, GQA 9/3, vocabulary 4096) in fp32, AdamW, and samples of
very different lengths from the quickstart's text: the first line of a fortune is the prompt, the rest is
learned; of one line, all. Both sides read the same directory of Hugging Face and the same JSON lines, and run
the same number of steps of eight rows of 256 tokens. Useful tokens are those of samples, not of padding.
Transformers runs twice a round: with rows packed (positions begin anew, its own block mask), and with batches
padded to their longest, samples of like length together; the better counts. Prints useful tokens/s and the
peak of resident memory of each round, the medians and their ratio. Needs torch, transformers, peft
(scripts/peers.sh makes the environment) and build/quickstart (scripts/quickstart.sh).
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, LENGTH, STEPS, RANK = 8, 256, 12, 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_base(home, tokenizer):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=6,
                         num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=LENGTH,
                         tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(home / "base")
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer),
                            eos_token="<|endoftext|>").save_pretrained(home / "base")


def write_samples(home, text):
    with open(home / "samples.jsonl", "w") as out:
        for fortune in text.read_text().split("\n%\n"):
            first, _, rest = fortune.partition("\n")
            if fortune.strip():
                out.write(json.dumps({"prompt": first + "\n" if rest else "", "completion": rest or first}) +
                          "\n")


def write_recipe(home, method):
    peft = (f"peft: {{preset: canonical_lora, dim: {RANK}, alpha: {2 * RANK}, dropout: 0}}\n"
            if method == "lora" else "")
    (home / "tune.yaml").write_text(f"""
model: {{preset: "hf:{home}/base", seq_length: {LENGTH}}}
checkpoint: {{pretrained_checkpoint: "hf:{home}/base"}}
tokenizer: {{preset: huggingface, tokenizer_model: "{home}/base"}}
dataset: {{preset: sft, train_files: ["{home}/samples.jsonl"], packing: true}}
optimizer: {{preset: adamw, lr: 1e-4}}
scheduler: constant
mixed_precision: fp32
train: {{micro_batch_size: {ROWS}, global_batch_size: {ROWS}, train_iters: {STEPS}}}
logger: {{log_interval: 1}}
{peft}""")


def peak_of(command):
    """Standard output and the peak of resident memory in MiB."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        if status != 0:
            errors.seek(0)
            sys.exit(f"failed: {' '.join(map(str, command))}\n{errors.read()[-2000:]}")
    return out, usage.ru_maxrss / 1024


def capstan(program, home):
    run = home / f"run-{time.time_ns()}"
    _, peak = peak_of([program, "train", str(home / "tune.yaml"), "--run-dir", str(run), "-q"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_seconds" in row][2:]
    seconds = statistics.median(row["step_seconds"] for row in steps)
    return ROWS * LENGTH * fill(program, home) / seconds, peak


def fill(program, home):
    """Share of the packed rows' places that samples take."""
    out = subprocess.run([program, "data", "inspect", str(home / "tune.yaml"), "--json"], check=True,
                         stdout=subprocess.PIPE).stdout
    report = json.loads(out)
    return report["tokens"] / (report["rows"] * report["row_length"])


def samples_of(home):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    samples = []
    for line in open(home / "samples.jsonl"):
        row = json.loads(line)
        prompt, rest = (tokenizer(row[key], add_special_tokens=False).input_ids
                        for key in ("prompt", "completion"))
        ids = (prompt + rest + [tokenizer.eos_token_id])[: LENGTH]
        labels = ([-100] * len(prompt) + rest + [tokenizer.eos_token_id])[: LENGTH]
        samples.append((ids, labels))
    return samples


def packed(samples):
    """Rows of LENGTH places, filled by first fit of the longest."""
    import torch
    rows, free = [], []
    for sample in sorted(samples[:4000], key=lambda s: -len(s[0])):
        place = next((i for i, left in enumerate(free) if left >= len(sample[0])), None)
        if place is None:
            rows.append([])
            free.append(LENGTH)
            place = len(rows) - 1
        rows[place].append(sample)
        free[place] -= len(sample[0])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for begin in range(0, len(order) - ROWS, ROWS):
        ids, labels, positions = (torch.zeros(ROWS, LENGTH, dtype=torch.long) for _ in range(3))
        labels[:] = -100
        useful = 0
        for r in range(ROWS):
            at = 0
            for tokens, targets in rows[order[begin + r]]:
                end = at + len(tokens)
                ids[r, at:end], labels[r, at:end] = torch.tensor(tokens), torch.tensor(targets)
                labels[r, at] = -100  # nothing of this sample comes before it
                positions[r, at:end] = torch.arange(len(tokens))
                useful += len(tokens)
                at = end
            positions[r, at:] = torch.arange(LENGTH - at)
        yield {"input_ids": ids, "position_ids": positions, "labels": labels}, useful


def padded(samples):
    """As many samples as fill eight rows on average, of like length, to the length of the longest."""
    import torch
    ordered = sorted(samples[:4000], key=lambda s: -len(s[0]))
    batches, begin = [], 0
    while begin < len(ordered):
        count = max(1, ROWS * LENGTH // len(ordered[begin][0]))
        batches.append(ordered[begin : begin + count])
        begin += count
    for index in torch.randperm(len(batches), generator=torch.Generator().manual_seed(1)).tolist():
        batch = batches[index]
        longest = max(len(ids) for ids, _ in batch)
        fill = lambda values, with_: torch.tensor([v + [with_] * (longest - len(v)) for v in values])
        yield ({"input_ids": fill([ids for ids, _ in batch], 0),
                "labels": fill([labels for _, labels in batch], -100),
                "attention_mask": fill([[1] * len(ids) for ids, _ in batch], 0)},
               sum(len(ids) for ids, _ in batch))


def transformers_rate(home, method, rows):
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    if method == "lora":
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS,
                                                 task_type="CAUSAL_LM"))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    rates = []
    for batch, useful in {"packed": packed, "padded": padded}[rows](samples_of(home)):
        start = time.perf_counter()
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.append(useful / (time.perf_counter() - start))
        if len(rates) == STEPS:
            break
    return statistics.median(rates[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["full", "lora"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capstan", default="build/release/capstan")
    parser.add_argument("--texts", type=pathlib.Path, default="build/quickstart",
                        help="train.txt and tokenizer.json")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)  # the other process of a round
    args = parser.parse_args()
    if args.peer:
        print(transformers_rate(pathlib.Path(args.peer[0]), args.method, args.peer[1]))
        return
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        write_base(home, args.texts / "tokenizer.json")
        write_samples(home, args.texts / "train.txt")
        write_recipe(home, args.method)
        ours, theirs, memory = [], [], []
        for number in range(args.rounds):
            rate, peak = capstan(args.capstan, home)
            peers = {}
            for rows in ("packed", "padded"):
                out, used = peak_of([sys.executable, __file__, args.method, "--peer", str(home), rows])
                peers[rows] = float(out), used
            best = max(peers, key=lambda rows: peers[rows][0])
            ours.append(rate)
            theirs.append(peers[best][0])
            memory.append((peak, min(used for _, used in peers.values())))
            print(f"round {number + 1}: capstan {rate:.0f} useful tokens/s, {peak:.0f} MiB; "
                  + ", ".join(f"Transformers {rows} {value:.0f}, {used:.0f} MiB"
                              for rows, (value, used) in peers.items()), flush=True)
        print(f"{args.method}: capstan / Transformers = "
              f"{statistics.median(ours) / statistics.median(theirs):.2f}; peak memory "
              f"{statistics.median(m for m, _ in memory):.0f} MiB to "
              f"{statistics.median(m for _, m in memory):.0f} MiB")


if __name__ == "__main__":
    main()

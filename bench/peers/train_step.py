#!/usr/bin/env python3
"""train_step.py SHAPE [--rounds N] [--capstan PATH] [--beside PATH] [--without-pytorch] [--dtype fp32|bf16]:
a training step of Capstan and of PyTorch, in turns.

SHAPE: gpt2-124m (4 x 1024 tokens, PyTorch eager), quickstart (2 x 256, Transformers' Llama), llama-26m (8 x
256, Transformers' Llama). Each round runs both programs, one after the other; a step is forward, backward,
clipping and AdamW. Prints tokens/s of each round, the medians and their ratio, and both as fractions of the
peak GEMM throughput measured in that type (GEMMs of 2048 x 2048 x 2048 by this program's torch.mm, Capstan
and oneDNN; torch.mm of the shapes of the model's linear layers).
With --beside another build of Capstan, for example of the commit before, takes turns with --capstan in every
round; prints its rates too, and the ratio of the two builds.
Needs torch and transformers (scripts/peers.sh makes the environment), or with --without-pytorch nothing.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

SHAPES = {
    "gpt2-124m": dict(batch=4, length=1024, recipe=["gpt2-124m", "mixed_precision=fp32",
                                                    "train.micro_batch_size=4", "train.global_batch_size=4",
                                                    "model.hidden_dropout=0", "model.attention_dropout=0"]),
    "quickstart": dict(batch=2, length=256, recipe=["quickstart", "train.global_batch_size=2"]),
    "llama-26m": dict(batch=8, length=256, recipe=["bench/recipes/llama-26m.yaml"]),
}


def make_model(shape):
    import torch
    torch.manual_seed(1)
    if shape == "gpt2-124m":
        return Gpt2(50304, 1024, 768, 12, 12)
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"quickstart": dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                                num_attention_heads=8, num_key_value_heads=4),
             "llama-26m": dict(vocab_size=8192, hidden_size=576, intermediate_size=1536, num_hidden_layers=6,
                               num_attention_heads=9, num_key_value_heads=3)}[shape]
    config = LlamaConfig(max_position_embeddings=256, tie_word_embeddings=True, use_cache=False, **sizes)
    return LlamaForCausalLM(config)


def Gpt2(vocab, length, width, layers, heads):
    """GPT-2 as short as PyTorch lets it be: its own fused attention, tied head."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2)
                       for y in self.qkv(self.norm1(x)).split(width, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
            x = x + self.out(y)
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)

        def forward(self, input_ids, labels):
            x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.words.weight)
            loss = F.cross_entropy(logits.view(-1, vocab), labels.reshape(-1))
            return type("Result", (), {"loss": loss})

    return Model()


def best_gemm(model, tokens, dtype):
    """GFLOP/s of the fastest GEMM of the model's linear layers: forward, input or weight gradient."""
    import torch
    sizes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    best = 0.0
    for inner, outer in sizes:
        x, dy, w = (torch.rand(*size).to(dtype) for size in ((tokens, inner), (tokens, outer),
                                                             (outer, inner)))
        for left, right in ((x, w.t()), (dy, w), (dy.t(), x)):
            for _ in range(4):
                start = time.perf_counter()
                torch.mm(left, right)
                best = max(best, 2 * tokens * inner * outer / (time.perf_counter() - start) / 1e9)
    return best


def torch_rate(shape, dtype, seconds=20.0):
    import torch
    from torch.nn import functional as F
    spec = SHAPES[shape]
    a, b = (torch.rand(2048, 2048).to(torch.bfloat16 if dtype == "bf16" else torch.float32) for _ in range(2))
    gemm_times = []

    def time_gemm():
        start = time.perf_counter()
        torch.mm(a, b)
        gemm_times.append(time.perf_counter() - start)

    for _ in range(8):
        time_gemm()
    peak = 2 * 2048**3 / min(gemm_times) / 1e9
    gemm_times.clear()
    model = make_model(shape)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    peak = max(peak, best_gemm(model, spec["batch"] * spec["length"], a.dtype))
    vocab = 50257 if shape == "gpt2-124m" else model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    began = time.perf_counter()
    while len(times) < 4 or (time.perf_counter() - began < seconds and len(times) < 200):
        ids = torch.randint(0, vocab, (spec["batch"], spec["length"] + 1))
        start = time.perf_counter()
        if shape == "gpt2-124m":
            loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        else:
            loss = F.cross_entropy(model(ids[:, :-1]).logits.float().flatten(0, 1), ids[:, 1:].flatten())
        forward = time.perf_counter() - start
        time_gemm()
        start = time.perf_counter()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(forward + time.perf_counter() - start)
        time_gemm()
    step = statistics.median(times[1:])
    # GEMM throughput between the passes: tokens_per_gflop does not depend on the machine's load.
    concurrent = 2 * 2048**3 / statistics.mean(gemm_times) / 1e9
    return {"tokens_per_second": spec["batch"] * spec["length"] / step, "gemm_gflops": peak,
            "tokens_per_gflop": spec["batch"] * spec["length"] / statistics.mean(times[1:]) / concurrent}


def capstan_rate(shape, capstan, dtype):
    recipe, *overrides = SHAPES[shape]["recipe"]
    if dtype == "bf16":
        overrides = [o for o in overrides
                     if not o.startswith("mixed_precision")] + ["mixed_precision=bf16_mixed"]
    out = subprocess.run([capstan, "bench", "step", "--json", "--seconds", "1", "-r", recipe, *overrides],
                         check=True, stdout=subprocess.PIPE).stdout
    result = json.loads(out)
    return {"tokens_per_second": result["step"]["tokens_per_second"],
            "gemm_gflops": result["step_gemm_gflops"], "fraction": result["step"]["fraction_of_peak"],
            "concurrent": result["step"]["fraction_of_concurrent"],
            "tokens_per_gflop": result["step"]["tokens_per_second"] / result["step"]["concurrent_gflops"]}


def peer_rate(args):
    out = subprocess.run([sys.executable, __file__, args.shape, "--torch-only", "--dtype", args.dtype],
                         check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out)


def median(rounds, key):
    return statistics.median(result[key] for result in rounds)


def print_capstan(number, name, mine, peer):
    """A round of one build. Fractions are of the peak GEMM throughput of the round."""
    peak = max(mine["gemm_gflops"], peer["gemm_gflops"] if peer else 0)
    mine["of_peak"] = mine["fraction"] * mine["gemm_gflops"] / peak
    text = (f"round {number}: {name} {mine['tokens_per_second']:.1f} tokens/s ({100 * mine['of_peak']:.1f} % "
            f"of peak, {100 * mine['concurrent']:.1f} % of the GEMM run between its operations), ")
    if peer:
        fraction = mine["of_peak"] * peer["tokens_per_second"] / mine["tokens_per_second"]
        text += f"PyTorch {peer['tokens_per_second']:.1f} ({100 * fraction:.1f} %), "
    text += f"GEMM capstan or oneDNN {mine['gemm_gflops']:.1f}"
    print(text + (f", torch {peer['gemm_gflops']:.1f}" if peer else "") + " GFLOP/s", flush=True)


def print_ratio(what, first, second, shape):
    """The ratio of two programs' tokens/s, as measured and at equal GEMM throughput."""
    rate = median(first, "tokens_per_second") / median(second, "tokens_per_second")
    # Round by round, because the machine's throughput changes from one to the next.
    normal = statistics.median(a["tokens_per_gflop"] / b["tokens_per_gflop"] for a, b in zip(first, second))
    print(f"{shape}: {what} = {rate:.2f}; at equal GEMM throughput {normal:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capstan", default="build/release/capstan")
    parser.add_argument("--beside", metavar="PATH", help="another build of Capstan, in turns with --capstan")
    parser.add_argument("--without-pytorch", action="store_true")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--torch-only", action="store_true",
                        help=argparse.SUPPRESS)  # the other process of a round
    args = parser.parse_args()
    if args.torch_only:
        print(json.dumps(torch_rate(args.shape, args.dtype)))
        return
    builds = {"capstan": args.capstan} | ({"beside": args.beside} if args.beside else {})
    rounds = {name: [] for name in builds}
    peers = []
    for number in range(1, args.rounds + 1):
        # The first of a round is another one each time.
        for name in sorted(builds, reverse=number % 2 == 0):
            rounds[name].append(capstan_rate(args.shape, builds[name], args.dtype))
        peer = None if args.without_pytorch else peer_rate(args)
        peers += [peer] if peer else []
        for name in sorted(builds, reverse=True):
            print_capstan(number, name, rounds[name][-1], peer)
    shape = f"{args.shape} {args.dtype}"
    for name, results in rounds.items():
        print(f"{shape}: {name}: fraction of peak {100 * median(results, 'of_peak'):.1f} %, of a GEMM run at "
              f"the same time {100 * median(results, 'concurrent'):.1f} %")
        if peers:
            print_ratio(f"{name} / PyTorch", results, peers, shape)
    if args.beside:
        print_ratio("capstan / beside", rounds["capstan"], rounds["beside"], shape)


if __name__ == "__main__":
    main()

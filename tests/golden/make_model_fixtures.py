#!/usr/bin/env python3
"""Golden fixtures of tiny language models: python3 tests/golden/make_model_fixtures.py [--check-only] [NAME…]

For each model of MODELS: parameters (fp32, under Capstan's names and in its layout), logits, loss, the
gradient of every parameter and the losses of ten AdamW steps, computed in fp64 by the plain PyTorch functions
below, written to tests/golden/models/NAME.safetensors. Before that the same weights are put into the Hugging
Face implementation of the architecture, whose logits must agree (to 1e-4: it works in fp32 inside).

Needs torch, transformers, safetensors.
"""

import math
import pathlib
import sys

import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "models"
STEPS, BATCH, SEQ = 10, 3, 23
LR, BETAS, EPS, DECAY, CLIP = 2e-3, (0.9, 0.95), 1e-8, 0.1, 1.0

MODELS = {
    "gpt2": dict(hidden=48, layers=2, heads=6, groups=6, head_dim=8, ffn=116, vocab=131, positions=29,
                 norm="layer", eps=1e-5, act="gelu_tanh", gated=False, bias=True, qkv_bias=True, tied=True,
                 rope=None, qk_norm=False, window=None),
    "llama": dict(hidden=42, layers=3, heads=6, groups=2, head_dim=8, ffn=72, vocab=131, positions=None,
                  norm="rms", eps=1e-6, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                  rope=dict(base=10000.0), qk_norm=False, window=None),
    "llama_variant": dict(hidden=48, layers=2, heads=6, groups=3, head_dim=10, ffn=56, vocab=131,
                          positions=None, norm="rms", eps=1e-5, act="silu", gated=True, bias=False,
                          qkv_bias=True, tied=True,
                          rope=dict(base=100.0, kind="llama3", factor=8.0, low=1.0, high=4.0, original=16),
                          qk_norm=True, window=7),
    # What the families of Hugging Face compute beyond these; their sizes are smaller:
    # what differs is not size.
    "llama_biases": dict(hidden=20, layers=2, heads=4, groups=2, head_dim=6, ffn=28, vocab=71, positions=None,
                         norm="rms", eps=1e-5, act="silu", gated=True, bias=True, qkv_bias=True, tied=True,
                         qk_norm=False, window=None,
                         rope=dict(base=50.0, kind="yarn", factor=4.0, original=16, beta_fast=1.5,
                                   beta_slow=0.3)),
    "olmo2": dict(hidden=20, layers=2, heads=6, groups=3, head_dim=6, ffn=28, vocab=71, positions=None,
                  norm="rms", eps=1e-6, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                  qk_norm="across", window=None, rope=dict(base=500.0, kind="linear", factor=2.5),
                  placement="output"),
    "gemma2": dict(hidden=20, layers=3, heads=4, groups=2, head_dim=6, ffn=28, vocab=71, positions=None,
                   norm="rms", eps=1e-6, act="gelu_tanh", gated=True, bias=False, qkv_bias=False, tied=True,
                   qk_norm=False, window=5, rope=dict(base=10000.0), placement="both", zero_centered=True,
                   multiplier=math.sqrt(20), full_every=2, scale=1 / math.sqrt(9), softcap=1.5,
                   final_softcap=2.5, embedding_std=0.2),
    "phi3": dict(hidden=20, layers=2, heads=4, groups=2, head_dim=5, rotary=4, ffn=28, vocab=71,
                 positions=None, norm="rms", eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=False,
                 tied=False, qk_norm=False, window=6, rope=dict(base=10000.0)),
    "phi3_long": dict(hidden=20, layers=2, heads=5, groups=5, head_dim=4, ffn=28, vocab=71, positions=None,
                      norm="rms", eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                      qk_norm=False, window=None,
                      rope=dict(base=100.0, kind="longrope", factor=4.0, original=16, short=[1.0, 1.25],
                                long=[1.5, 7.0])),
    # Parallel attention and MLP: both read the layer's input.
    "gpt_neox": dict(parallel=True, hidden=24, layers=2, heads=4, groups=4, head_dim=6, rotary=4, ffn=36,
                     vocab=71, positions=None, norm="layer", eps=1e-5, act="gelu", gated=False, bias=True,
                     qkv_bias=True, tied=False, rope=dict(base=500.0), qk_norm=False, window=None),
    # Models with experts. `dense`: dense layers before those with experts; `normalized`: the probabilities of
    # the chosen experts sum to 1; `aux`, `z`: coefficients of the losses of the router.
    "mixtral": dict(hidden=20, layers=2, heads=4, groups=2, head_dim=6, ffn=14, vocab=71, positions=None,
                    norm="rms", eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                    qk_norm=False, window=None, rope=dict(base=10000.0),
                    moe=dict(experts=5, topk=2, ffn=14, normalized=True, aux=0.05)),
    "qwen2_moe": dict(hidden=24, layers=2, heads=4, groups=2, head_dim=6, ffn=28, vocab=71, positions=None,
                      norm="rms", eps=1e-6, act="silu", gated=True, bias=False, qkv_bias=True,
                      tied=False, qk_norm=False, window=None, rope=dict(base=10000.0),
                      moe=dict(experts=4, topk=2, ffn=10, normalized=False, shared=18, z=0.01)),
    "qwen3_moe": dict(hidden=20, layers=3, heads=4, groups=2, head_dim=6, ffn=28, vocab=71, positions=None,
                      norm="rms", eps=1e-6, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                      qk_norm=True, window=None, rope=dict(base=10000.0),
                      moe=dict(experts=6, topk=3, ffn=10, normalized=True, dense=1, aux=0.02, z=0.003)),
    "olmoe": dict(hidden=24, layers=2, heads=4, groups=4, head_dim=6, ffn=10, vocab=71, positions=None,
                  norm="rms", eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                  qk_norm="across", window=None, rope=dict(base=10000.0),
                  moe=dict(experts=7, topk=3, ffn=10, normalized=False)),
    # Latent attention: compressed queries or not, YaRN with a factor of the softmax scale, widths of its own
    # for queries and keys and for values.
    "deepseek": dict(hidden=20, layers=2, heads=4, groups=4, head_dim=9, ffn=28, vocab=71, positions=None,
                     norm="rms", eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=False, tied=False,
                     qk_norm=False, window=None, rotary=4,
                     latent=dict(q=11, kv=10, nope=5, value=7, eps=1e-6),
                     rope=dict(base=50.0, kind="yarn", factor=4.0, original=16, beta_fast=1.5, beta_slow=0.3,
                               mscale=1.0, mscale_all=0.8)),
    "deepseek_lite": dict(hidden=20, layers=2, heads=4, groups=4, head_dim=10, ffn=28, vocab=71,
                          positions=None, norm="rms", eps=1e-6, act="silu", gated=True, bias=False,
                          qkv_bias=False, tied=False, qk_norm=False, window=None, rotary=6,
                          latent=dict(q=None, kv=8, nope=4, value=3, eps=1e-6), rope=dict(base=10000.0)),
    # DeepSeek-V3's router: sigmoids, a bias of the choice, groups ranked by their two highest scores.
    "deepseek_moe": dict(hidden=20, layers=2, heads=4, groups=4, head_dim=9, ffn=28, vocab=71,
                         positions=None, norm="rms", eps=1e-5, act="silu", gated=True, bias=False,
                         qkv_bias=False, tied=False, qk_norm=False, window=None, rotary=4,
                         latent=dict(q=11, kv=10, nope=5, value=7, eps=1e-6), rope=dict(base=10000.0),
                         moe=dict(experts=8, topk=3, ffn=10, normalized=True, dense=1, shared=10,
                                  sigmoid=True, groups=4, group_topk=2, scaling=2.5, aux=0.02)),
    # Attention sinks, a limited activation with an offset, biases of router and experts, YaRN without rounding.
    # The seed: gradients of sinks are small sums of large terms. Of 3000 seeds it is one of the five with a
    # margin above 2.5e-3 whose gradients change least under noise of bf16's size in the weights.
    "gpt_oss": dict(seed=3214, hidden=20, layers=3, heads=4, groups=2, head_dim=6, ffn=10, vocab=71,
                    positions=None, norm="rms", eps=1e-5, act="quick_gelu", limit=1.5, offset=1, gated=True,
                    bias=True, qkv_bias=True, tied=False, qk_norm=False, window=5, full_every=2, sinks=True,
                    rope=dict(base=50.0, kind="yarn", factor=4.0, original=16, beta_fast=1.5, beta_slow=0.3,
                              truncate=False),
                    moe=dict(experts=5, topk=2, ffn=10, normalized=True, bias=True)),
    # Multi-token prediction of one and two depths, by Megatron's rules. Hugging Face's classes do not have it:
    # their logits are those of the model `like`.
    "gpt2_mtp": dict(like="gpt2", hidden=24, layers=2, heads=4, groups=4, head_dim=6, ffn=36, vocab=71,
                     positions=29, norm="layer", eps=1e-5, act="gelu_tanh", gated=False, bias=True,
                     qkv_bias=True, tied=True, rope=None, qk_norm=False, window=None,
                     mtp=dict(depths=2, factor=0.4)),
    "llama_mtp": dict(like="llama", hidden=20, layers=2, heads=4, groups=2, head_dim=6, ffn=28, vocab=71,
                      positions=None, norm="rms", eps=1e-5, act="silu", gated=True, bias=False,
                      qkv_bias=False, tied=False, rope=dict(base=10000.0), qk_norm=False, window=None,
                      mtp=dict(depths=1, factor=0.3)),
    # The seed: of 9000 the one with the largest margin, of three routers.
    "deepseek_mtp": dict(like="deepseek_moe", seed=2915, hidden=20, layers=2, heads=4, groups=4, head_dim=9,
                         ffn=28, vocab=71, positions=None, norm="rms", eps=1e-5, act="silu", gated=True, bias=False,
                         qkv_bias=False, tied=False, qk_norm=False, window=None, rotary=4,
                         latent=dict(q=11, kv=10, nope=5, value=7, eps=1e-6), rope=dict(base=10000.0),
                         moe=dict(experts=8, topk=3, ffn=10, normalized=True, dense=1, shared=10,
                                  sigmoid=True, groups=4, group_topk=2, scaling=2.5, aux=0.02),
                         mtp=dict(depths=1, factor=0.2)),
}


def has_experts(c, layer):
    return "moe" in c and layer >= c["moe"].get("dense", 0)


def make_latent_parameters(c, attention, linear, norm):
    h, heads, m = c["hidden"], c["heads"], c["latent"]
    if m["q"]:
        linear(attention + "linear_q_down_proj", m["q"], h, False)
        norm(attention + "q_layernorm", m["q"])
        linear(attention + "linear_q_up_proj", heads * c["head_dim"], m["q"], False)
    else:
        linear(attention + "linear_q_proj", heads * c["head_dim"], h, False)
    linear(attention + "linear_kv_down_proj", m["kv"] + c["rotary"], h, False)
    norm(attention + "kv_layernorm", m["kv"])
    linear(attention + "linear_kv_up_proj", heads * (m["nope"] + m["value"]), m["kv"], False)


def make_parameters(c, generator):
    """name -> fp32 tensor, Capstan's names and layout.

    The scales are such that gradients are well conditioned:
    PyTorch's own bf16 is within 2e-2 of fp64 for every parameter.
    """
    h, q, k = c["hidden"], c["heads"] * c["head_dim"], c["groups"] * c["head_dim"]
    normal = lambda *shape, std=0.1: torch.randn(*shape, generator=generator) * std
    placement = c.get("placement", "input")
    p = {"embedding.word_embeddings.weight": normal(c["vocab"], h, std=c.get("embedding_std", 0.5))}
    if c["positions"]:
        p["embedding.position_embeddings.weight"] = normal(c["positions"], h, std=0.3)

    def norm(name, width):
        p[name + ".weight"] = normal(width) + (0 if c.get("zero_centered") else 1)
        if c["norm"] == "layer":
            p[name + ".bias"] = normal(width)

    def linear(name, out, inputs, bias):
        p[name + ".weight"] = normal(out, inputs, std=0.6 / math.sqrt(inputs))
        if bias:
            p[name + ".bias"] = normal(out)

    def transformer_layer(layer, i):
        if placement != "output":
            norm(layer + "input_layernorm", h)
        if "latent" in c:
            make_latent_parameters(c, layer + "self_attention.", linear, norm)
            values = c["heads"] * c["latent"]["value"]
        else:
            values = q
            linear(layer + "self_attention.linear_qkv", q + 2 * k, h, c["qkv_bias"])
        if "sinks" in c:
            p[layer + "self_attention.core_attention.softmax_offset"] = normal(c["heads"], std=1)
        if c["qk_norm"]:
            norm(layer + "self_attention.q_layernorm", q if c["qk_norm"] == "across" else c["head_dim"])
            norm(layer + "self_attention.k_layernorm", k if c["qk_norm"] == "across" else c["head_dim"])
        linear(layer + "self_attention.linear_proj", h, values, c["bias"])
        if placement != "input":
            norm(layer + "post_attention_layernorm", h)
        if placement != "output":
            norm(layer + "pre_mlp_layernorm", h)
        if has_experts(c, i):
            m = c["moe"]
            p[layer + "mlp.router.weight"] = normal(m["experts"], h, std=2 / math.sqrt(h))
            experts = layer + "mlp.experts."
            p[experts + "linear_fc1.weight"] = normal(m["experts"], 2 * m["ffn"], h, std=0.6 / math.sqrt(h))
            p[experts + "linear_fc2.weight"] = normal(m["experts"], h, m["ffn"],
                                                      std=0.6 / math.sqrt(m["ffn"]))
            if "bias" in m:
                p[layer + "mlp.router.bias"] = normal(m["experts"])
                p[experts + "linear_fc1.bias"] = normal(m["experts"], 2 * m["ffn"])
                p[experts + "linear_fc2.bias"] = normal(m["experts"], h)
            if m.get("sigmoid"):
                p[layer + "mlp.router.expert_bias"] = normal(m["experts"], std=0.2)
            if "shared" in m:
                linear(layer + "mlp.shared_experts.linear_fc1", 2 * m["shared"], h, False)
                linear(layer + "mlp.shared_experts.linear_fc2", h, m["shared"], False)
            if "shared" in m and not m.get("sigmoid"):
                p[layer + "mlp.shared_experts.gate_weight"] = normal(1, h, std=1 / math.sqrt(h))
        else:
            linear(layer + "mlp.linear_fc1", c["ffn"] * (2 if c["gated"] else 1), h, c["bias"])
            linear(layer + "mlp.linear_fc2", h, c["ffn"], c["bias"])
        if placement != "input":
            norm(layer + "post_feedforward_layernorm", h)

    for i in range(c["layers"]):
        transformer_layer(f"decoder.layers.{i}.", i)
    norm("decoder.final_layernorm", h)
    if not c["tied"]:
        p["output_layer.weight"] = normal(c["vocab"], h, std=1 / math.sqrt(h))
    for depth in range(c.get("mtp", {}).get("depths", 0)):
        ours = f"mtp.layers.{depth}."
        norm(ours + "enorm", h)
        norm(ours + "hnorm", h)
        linear(ours + "eh_proj", h, 2 * h, False)
        transformer_layer(ours + "transformer_layer.", c["layers"] - 1)
        norm(ours + "final_layernorm", h)
    return p


def apply_norm(c, p, name, x):
    if c["norm"] == "layer":
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + c["eps"]) * p[name + ".weight"] + p[name + ".bias"]
    gamma = p[name + ".weight"] + (1 if c.get("zero_centered") else 0)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c["eps"]) * gamma


def yarn_stretched(r, d):  # how far each pair is stretched: 0 … 1
    pair_of = lambda turns: d * math.log(r["original"] / (turns * 2 * math.pi)) / (2 * math.log(r["base"]))
    low, high = pair_of(r["beta_fast"]), pair_of(r["beta_slow"])
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    assert low != high
    return [min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)]


def inverse_frequencies(c, length):
    r, d = c["rope"], c.get("rotary", c["head_dim"])
    frequencies = [r["base"] ** (-2 * i / d) for i in range(d // 2)]
    kind = r.get("kind")
    if kind == "linear":
        frequencies = [f / r["factor"] for f in frequencies]
    if kind == "yarn":
        frequencies = [f * (1 - s) + f / r["factor"] * s for f, s in zip(frequencies, yarn_stretched(r, d))]
    if kind == "longrope":
        frequencies = [f / s for f, s in
                       zip(frequencies, r["long"] if length > r["original"] else r["short"])]
    if kind != "llama3":
        return torch.tensor(frequencies, dtype=torch.float64)
    scaled = []
    for f in frequencies:
        wavelength = 2 * math.pi / f
        if wavelength < r["original"] / r["high"]:
            scaled.append(f)
        elif wavelength > r["original"] / r["low"]:
            scaled.append(f / r["factor"])
        else:
            smooth = (r["original"] / wavelength - r["low"]) / (r["high"] - r["low"])
            scaled.append((1 - smooth) * f / r["factor"] + smooth * f)
    return torch.tensor(scaled, dtype=torch.float64)


def attention_factor(r):  # of cos and sin
    if r.get("kind") == "yarn":
        return mscale(r, r.get("mscale", 1)) / mscale(r, r.get("mscale_all", 0))
    return (math.sqrt(1 + math.log(r["factor"]) / math.log(r["original"]))
            if r.get("kind") == "longrope" else 1)


def mscale(r, m):
    return 0.1 * m * math.log(r["factor"]) + 1


def rotate_pairs(c, x):  # neighbors, all elements
    angle = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] *
             inverse_frequencies(c, x.shape[1])[None, :])[None, :, None, :]
    factor = attention_factor(c["rope"])
    a, b = x[..., 0::2], x[..., 1::2]
    return factor * torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()],
                                -1).flatten(-2)


def latent_heads(c, p, attention, x):  # queries, keys and values [B, S, heads, d]
    m, heads, r = c["latent"], c["heads"], c["rope"]
    inner = c | {"eps": m["eps"]}
    if m["q"]:
        q = apply_norm(inner, p, attention + "q_layernorm", linear(p, attention + "linear_q_down_proj", x))
        q = linear(p, attention + "linear_q_up_proj", q)
    else:
        q = linear(p, attention + "linear_q_proj", x)
    q = q.view(*x.shape[:2], heads, c["head_dim"])
    compressed, shared = linear(p, attention + "linear_kv_down_proj", x).split([m["kv"], c["rotary"]], -1)
    kv = linear(p, attention + "linear_kv_up_proj",
                apply_norm(inner, p, attention + "kv_layernorm", compressed))
    k, v = kv.view(*x.shape[:2], heads, m["nope"] + m["value"]).split([m["nope"], m["value"]], -1)
    shared = rotate_pairs(c, shared[:, :, None, :]).expand(-1, -1, heads, -1)
    q = torch.cat([q[..., :m["nope"]], rotate_pairs(c, q[..., m["nope"]:])], -1)
    scale = mscale(r, r.get("mscale_all", 0)) if "factor" in r else 1  # of the softmax, on both sides
    return q * scale, torch.cat([k, shared], -1) * scale, v


def rotate(c, x):  # x [B, S, heads, d]
    rotary, factor = c.get("rotary", c["head_dim"]), attention_factor(c["rope"])
    half = rotary // 2
    angle = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] *
             inverse_frequencies(c, x.shape[1])[None, :])
    cos, sin = factor * angle.cos()[None, :, None, :], factor * angle.sin()[None, :, None, :]
    a, b = x[..., :half], x[..., half:rotary]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary:]], -1)


def activation(c, x):
    if c["act"] == "silu":
        return x * torch.sigmoid(x)
    if c["act"] == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if c["act"] == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, name, x):
    y = x @ p[name + ".weight"].T
    return y + p[name + ".bias"] if name + ".bias" in p else y


def gated_mlp(c, fc1, fc2, x, biases=(0, 0), margins=None):
    gate, up = (x @ fc1.T + biases[0]).chunk(2, -1)
    if "limit" in c:
        if margins is not None and len(x) > 0:  # gradients jump at the limits
            margins.append(min((gate - c["limit"]).abs().min().item(),
                               (up.abs() - c["limit"]).abs().min().item()))
        gate, up = gate.clamp(max=c["limit"]), up.clamp(-c["limit"], c["limit"])
    return (activation(c, gate) * (up + c.get("offset", 0))) @ fc2.T + biases[1]


def chosen_with_bias(m, scores, bias, margins):
    """DeepSeek-V3's choice, without a gradient."""
    scores = scores.detach() + bias
    of_groups = scores.view(len(scores), m["groups"], -1).topk(2, -1).values.sum(-1)
    groups = torch.sort(of_groups, -1, descending=True)
    margins.append((groups.values[:, m["group_topk"] - 1] - groups.values[:, m["group_topk"]]).min().item())
    allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, groups.indices[:, :m["group_topk"]],
                                                                    True)
    scores = scores.masked_fill(~allowed.repeat_interleave(m["experts"] // m["groups"], 1), float("-inf"))
    ordered = torch.sort(scores, -1, descending=True)
    margins.append((ordered.values[:, m["topk"] - 1] - ordered.values[:, m["topk"]]).min().item())
    return ordered.indices[:, :m["topk"]]


def mixture(c, p, name, x, router):  # x [B, S, hidden]
    """Adds the losses of the router to router["loss"], and its margin to router["margins"]."""
    m, shape = c["moe"], x.shape
    x = x.flatten(0, 1)
    logits = linear(p, name + "router", x)
    if m.get("sigmoid"):
        scores = torch.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
        chosen = chosen_with_bias(m, scores, p[name + "router.expert_bias"], router["margins"])
        weights = scores.gather(1, chosen)
        # The loss counts choices without groups and bias.
        counted = torch.topk(scores, m["topk"], -1).indices
        ordered = torch.sort(scores.detach(), -1, descending=True).values
    else:
        probabilities = torch.softmax(logits, -1)
        weights, chosen = torch.topk(probabilities, m["topk"], -1)
        counted = chosen
        ordered = torch.sort(logits.detach(), -1, descending=True).values
    router["margins"].append((ordered[:, m["topk"] - 1] - ordered[:, m["topk"]]).min().item())
    if m["normalized"]:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * m.get("scaling", 1)
    y = torch.zeros_like(x)
    for expert in range(m["experts"]):
        rows, slots = torch.nonzero(chosen == expert, as_tuple=True)
        biases = [p[name + f"experts.linear_fc{i}.bias"][expert] if "bias" in m else 0 for i in (1, 2)]
        part = gated_mlp(c, p[name + "experts.linear_fc1.weight"][expert],
                         p[name + "experts.linear_fc2.weight"][expert], x[rows], biases, router["margins"])
        y = y.index_add(0, rows, part * weights[rows, slots, None])
    if "shared" in m:
        shared = gated_mlp(c, p[name + "shared_experts.linear_fc1.weight"],
                           p[name + "shared_experts.linear_fc2.weight"], x)
        gate = name + "shared_experts.gate_weight"
        y = y + (torch.sigmoid(x @ p[gate].T) * shared if gate in p else shared)
    share = torch.nn.functional.one_hot(counted, m["experts"]).double().sum((0, 1)) / len(x)
    # Megatron's losses, means over the tokens of the micro-batch.
    balance = m["experts"] / m["topk"] * (share * probabilities.mean(0)).sum()
    z = (torch.logsumexp(logits, -1) ** 2).mean()
    router["loss"] = router["loss"] + m.get("aux", 0) * balance + m.get("z", 0) * z
    return y.view(shape)


def capped(logits, most):
    return most * torch.tanh(logits / most) if most else logits


def run_layer(c, p, layer, i, x, router):  # layer i of the model, with the parameters of `layer`
    b, s, _ = x.shape
    per_group, d = c["heads"] // c["groups"], c["head_dim"]
    placement = c.get("placement", "input")
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    seen = distance >= 0
    if c["window"] and not ("full_every" in c and (i + 1) % c["full_every"] == 0):
        seen &= distance < c["window"]
    y = apply_norm(c, p, layer + "input_layernorm", x) if placement != "output" else x
    if "latent" in c:
        q, k, v = latent_heads(c, p, layer + "self_attention.", y)
    else:
        qkv = linear(p, layer + "self_attention.linear_qkv", y).view(b, s, c["groups"], per_group + 2, d)
        q = qkv[..., :per_group, :].reshape(b, s, c["heads"], d)
        k, v = qkv[..., per_group, :], qkv[..., per_group + 1, :]
    if c["qk_norm"] == "across":
        q = apply_norm(c, p, layer + "self_attention.q_layernorm", q.flatten(2)).view(q.shape)
        k = apply_norm(c, p, layer + "self_attention.k_layernorm", k.flatten(2)).view(k.shape)
    elif c["qk_norm"]:
        q = apply_norm(c, p, layer + "self_attention.q_layernorm", q)
        k = apply_norm(c, p, layer + "self_attention.k_layernorm", k)
    if c["rope"] and "latent" not in c:
        q, k = rotate(c, q), rotate(c, k)
    k, v = k.repeat_interleave(per_group, 2), v.repeat_interleave(per_group, 2)
    scores = capped(torch.einsum("bqhd,bkhd->bhqk", q, k) * c.get("scale", 1 / math.sqrt(d)),
                    c.get("softcap"))
    scores = scores.masked_fill(~seen, float("-inf"))
    if "sinks" in c:  # a further score without a value
        sinks = p[layer + "self_attention.core_attention.softmax_offset"]
        scores = torch.cat([scores, sinks[None, :, None, None].expand(b, -1, s, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :s]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, s, -1)
    y = linear(p, layer + "self_attention.linear_proj", out)
    before = x
    x = x + (apply_norm(c, p, layer + "post_attention_layernorm", y) if placement != "input" else y)
    y = before if c.get("parallel") else x
    y = apply_norm(c, p, layer + "pre_mlp_layernorm", y) if placement != "output" else y
    if has_experts(c, i):
        y = mixture(c, p, layer + "mlp.", y, router)
    else:
        y = linear(p, layer + "mlp.linear_fc1", y)
        if c["gated"]:
            gate, up = y.chunk(2, -1)
            y = activation(c, gate) * up
        else:
            y = activation(c, y)
        y = linear(p, layer + "mlp.linear_fc2", y)
    x = x + (apply_norm(c, p, layer + "post_feedforward_layernorm", y) if placement != "input" else y)
    return x


def embed(c, p, tokens, positions):  # tokens, positions [B, S] -> [B, S, hidden]
    x = p["embedding.word_embeddings.weight"][tokens] * c.get("multiplier", 1)
    return x + p["embedding.position_embeddings.weight"][positions] if c["positions"] else x


def logits_of(c, p, x):
    head = p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"]
    return capped(x @ head.T, c.get("final_softcap"))


def hidden_states(c, p, tokens, router):  # tokens [B, S] -> [B, S, hidden], normalized
    x = embed(c, p, tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    for i in range(c["layers"]):
        x = run_layer(c, p, f"decoder.layers.{i}.", i, x, router)
    return apply_norm(c, p, "decoder.final_layernorm", x)


def forward(c, p, tokens, router=None):  # tokens [B, S] -> logits [B, S, V]
    router = {"loss": 0, "margins": []} if router is None else router
    x = hidden_states(c, p, tokens, router)
    if "mtp" in c:
        later_losses(c, p, x, tokens, tokens, torch.ones(tokens.shape), router)  # for the margins
    return logits_of(c, p, x)


def rolled(x):
    """One place to the left, as Megatron's roll_tensor: the last place holds 0."""
    x = torch.roll(x, -1, 1)
    x[:, -1] = 0
    return x


def later_losses(c, p, x, tokens, labels, mask, router):
    """The loss of each depth of multi-token prediction, from the normalized hidden states.

    A row's mean over the tokens that have a label weighs as much as the row in the loss of the model.
    """
    result, of_rows = [], mask.double().sum(1)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for depth in range(c["mtp"]["depths"]):
        tokens, labels, mask, positions = rolled(tokens), rolled(labels), rolled(mask), rolled(positions)
        ours = f"mtp.layers.{depth}."
        both = torch.cat([apply_norm(c, p, ours + "enorm", embed(c, p, tokens, positions)),
                          apply_norm(c, p, ours + "hnorm", x)], -1)
        x = run_layer(c, p, ours + "transformer_layer.", c["layers"] - 1, linear(p, ours + "eh_proj", both),
                      router)
        x = apply_norm(c, p, ours + "final_layernorm", x)
        losses = torch.nn.functional.cross_entropy(logits_of(c, p, x).flatten(0, 1), labels.flatten(),
                                                   reduction="none").view(labels.shape)
        means = (losses * mask).sum(1) / mask.double().sum(1)
        result.append((means * of_rows).sum() / of_rows.sum())
    return result


def token_losses(c, p, text, mask):
    """Logits, the losses of the tokens, the sum of the losses of all routers, the losses of later tokens."""
    router = {"loss": 0, "margins": []}
    tokens, labels = text[:, :-1], text[:, 1:]
    x = hidden_states(c, p, tokens, router)
    logits = logits_of(c, p, x)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long(),
                                               reduction="none")
    later = later_losses(c, p, x, tokens, labels, mask, router) if "mtp" in c else []
    return logits, losses, router["loss"], later


def objective(c, losses, mask, of_routers, later):
    """The mean loss, and what is minimized: with the losses of routers and of later tokens."""
    flat = mask.double().flatten()
    loss = (losses * flat).sum() / flat.sum()
    of_later = c["mtp"]["factor"] / len(later) * sum(later) if later else 0
    return loss, loss + of_routers + of_later


# ---- the same weights in Hugging Face's models ----


def rope_parameters(c):
    r = c["rope"]
    parameters = dict(rope_theta=r["base"], rope_type=r.get("kind", "default"))
    if "rotary" in c and "latent" not in c:
        parameters["partial_rotary_factor"] = c["rotary"] / c["head_dim"]
    names = dict(factor="factor", original="original_max_position_embeddings", low="low_freq_factor",
                 high="high_freq_factor", beta_fast="beta_fast", beta_slow="beta_slow", short="short_factor",
                 long="long_factor", mscale="mscale", mscale_all="mscale_all_dim", truncate="truncate")
    return parameters | {theirs: r[ours] for ours, theirs in names.items() if ours in r}


def split_qkv(c, tensor):  # rows [groups, per_group + 2, d] -> q, k, v
    per_group, d = c["heads"] // c["groups"], c["head_dim"]
    t = tensor.view(c["groups"], per_group + 2, d, *tensor.shape[1:])
    rest = tensor.shape[1:]
    return (t[:, :per_group].reshape(-1, *rest), t[:, per_group].reshape(-1, *rest),
            t[:, per_group + 1].reshape(-1, *rest))


def gpt2_model(c, p):  # and its weights
    import transformers

    state = {}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c["vocab"], n_positions=c["positions"], n_embd=c["hidden"], n_layer=c["layers"],
        n_head=c["heads"], n_inner=c["ffn"], layer_norm_epsilon=c["eps"], activation_function="gelu_new",
        attn_implementation="eager"))
    state["transformer.wte.weight"] = state["lm_head.weight"] = p["embedding.word_embeddings.weight"]
    state["transformer.wpe.weight"] = p["embedding.position_embeddings.weight"]
    for i in range(c["layers"]):
        ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
        for kind in ("weight", "bias"):
            turn = (lambda t: t.T) if kind == "weight" else (lambda t: t)
            state[theirs + "ln_1." + kind] = p[ours + "input_layernorm." + kind]
            state[theirs + "ln_2." + kind] = p[ours + "pre_mlp_layernorm." + kind]
            state[theirs + "attn.c_attn." + kind] = turn(
                torch.cat(split_qkv(c, p[ours + "self_attention.linear_qkv." + kind])))
            state[theirs + "attn.c_proj." + kind] = turn(p[ours + "self_attention.linear_proj." + kind])
            state[theirs + "mlp.c_fc." + kind] = turn(p[ours + "mlp.linear_fc1." + kind])
            state[theirs + "mlp.c_proj." + kind] = turn(p[ours + "mlp.linear_fc2." + kind])
    for kind in ("weight", "bias"):
        state["transformer.ln_f." + kind] = p["decoder.final_layernorm." + kind]
    return model, state


def gpt_neox_model(c, p):  # and its weights
    import transformers

    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=c["vocab"], hidden_size=c["hidden"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], intermediate_size=c["ffn"], layer_norm_eps=c["eps"],
        rope_parameters=rope_parameters(c), attn_implementation="eager"))
    theirs = {"embedding.word_embeddings": "gpt_neox.embed_in", "output_layer": "lm_head",
              "decoder.final_layernorm": "gpt_neox.final_layer_norm", "decoder.": "gpt_neox.",
              "pre_mlp_layernorm": "post_attention_layernorm",
              "self_attention.linear_qkv": "attention.query_key_value",
              "self_attention.linear_proj": "attention.dense", "mlp.linear_fc1": "mlp.dense_h_to_4h",
              "mlp.linear_fc2": "mlp.dense_4h_to_h"}
    state = {}
    for name, value in p.items():
        for our_part, their_part in theirs.items():
            name = name.replace(our_part, their_part)
        state[name] = value
    return model, state


def expert_model(name, c, common):
    import transformers

    m = c["moe"]
    common |= dict(num_experts_per_tok=m["topk"], experts_implementation="eager")
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(
            num_local_experts=m["experts"], **common))
    if name == "gpt_oss":
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(
            num_local_experts=m["experts"], sliding_window=c["window"], swiglu_limit=c["limit"], **common))
    common |= dict(num_experts=m["experts"], norm_topk_prob=m["normalized"])
    if name == "olmoe":
        del common["head_dim"]
        return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**common))
    common |= dict(moe_intermediate_size=m["ffn"], mlp_only_layers=list(range(m.get("dense", 0))))
    if name == "qwen2_moe":
        return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(
            shared_expert_intermediate_size=m["shared"], **common))
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common))


def decoder_model(name, c):
    import transformers

    common = dict(vocab_size=c["vocab"], hidden_size=c["hidden"], num_hidden_layers=c["layers"],
                  num_attention_heads=c["heads"], num_key_value_heads=c["groups"], head_dim=c["head_dim"],
                  intermediate_size=c["ffn"], rms_norm_eps=c["eps"], tie_word_embeddings=c["tied"],
                  max_position_embeddings=64, rope_parameters=rope_parameters(c),
                  attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if name == "llama_variant":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
            attention_bias=True, use_sliding_window=True, sliding_window=c["window"], max_window_layers=0,
            **common))
    elif name == "olmo2":
        model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**common))
    elif name == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
            query_pre_attn_scalar=round(1 / c["scale"] ** 2), sliding_window=c["window"],
            attn_logit_softcapping=c["softcap"],
            final_logit_softcapping=c["final_softcap"], hidden_activation="gelu_pytorch_tanh", **common))
    elif "moe" in c and "latent" not in c:
        model = expert_model(name, c, common)
    elif "latent" in c:
        m, moe = c["latent"], c.get("moe")
        family = "DeepseekV3" if m["q"] else "DeepseekV2"
        common.pop("head_dim")
        if moe:
            common |= dict(n_routed_experts=moe["experts"], num_experts_per_tok=moe["topk"],
                           moe_intermediate_size=moe["ffn"], n_group=moe["groups"],
                           topk_group=moe["group_topk"], routed_scaling_factor=moe["scaling"],
                           n_shared_experts=1, experts_implementation="eager")
        model = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(
            first_k_dense_replace=moe["dense"] if moe else c["layers"], q_lora_rank=m["q"], kv_lora_rank=m["kv"],
            qk_nope_head_dim=m["nope"], qk_rope_head_dim=c["rotary"], v_head_dim=m["value"], **common))
    elif name.startswith("phi3"):
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(
            sliding_window=c["window"], original_max_position_embeddings=c["rope"].get("original", 64),
            **common))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            attention_bias=c["bias"], mlp_bias=c["bias"], **common))
    return model


def gpt_oss_experts(p, ours, theirs, state):
    def alternating(x):  # gate and up
        return torch.stack(x.chunk(2, -1), -1).flatten(-2)

    for kind in ("weight", "bias"):
        state[theirs + "router." + kind] = p[ours + "router." + kind]
    experts = theirs + "experts."
    state[experts + "gate_up_proj"] = alternating(p[ours + "experts.linear_fc1.weight"].transpose(1, 2))
    state[experts + "gate_up_proj_bias"] = alternating(p[ours + "experts.linear_fc1.bias"])
    state[experts + "down_proj"] = p[ours + "experts.linear_fc2.weight"].transpose(1, 2)
    state[experts + "down_proj_bias"] = p[ours + "experts.linear_fc2.bias"]


def expert_weights(c, p, ours, theirs, state):
    if "bias" in c["moe"]:
        return gpt_oss_experts(p, ours, theirs, state)
    state[theirs + "gate.weight"] = p[ours + "router.weight"]
    state[theirs + "experts.gate_up_proj"] = p[ours + "experts.linear_fc1.weight"]
    state[theirs + "experts.down_proj"] = p[ours + "experts.linear_fc2.weight"]
    if "shared" in c["moe"]:
        gate, up = p[ours + "shared_experts.linear_fc1.weight"].chunk(2)
        shared = theirs + ("shared_experts." if "latent" in c else "shared_expert.")
        state[shared + "gate_proj.weight"], state[shared + "up_proj.weight"] = gate, up
        state[shared + "down_proj.weight"] = p[ours + "shared_experts.linear_fc2.weight"]
    if c["moe"].get("sigmoid"):
        state[theirs + "gate.e_score_correction_bias"] = p[ours + "router.expert_bias"]
    elif "shared" in c["moe"]:
        state[theirs + "shared_expert_gate.weight"] = p[ours + "shared_experts.gate_weight"]


def decoder_weights(name, c, p):
    state = {}
    state["model.embed_tokens.weight"] = p["embedding.word_embeddings.weight"]
    state["lm_head.weight"] = (p["embedding.word_embeddings.weight"] if c["tied"]
                               else p["output_layer.weight"])
    state["model.norm.weight"] = p["decoder.final_layernorm.weight"]
    for i in range(c["layers"]):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        placement = c.get("placement", "input")
        names = {"input": {"input_layernorm": "input_layernorm",
                           "post_attention_layernorm": "pre_mlp_layernorm"},
                 "output": {"post_attention_layernorm": "post_attention_layernorm",
                            "post_feedforward_layernorm": "post_feedforward_layernorm"},
                 "both": {"input_layernorm": "input_layernorm",
                          "pre_feedforward_layernorm": "pre_mlp_layernorm",
                          "post_attention_layernorm": "post_attention_layernorm",
                          "post_feedforward_layernorm": "post_feedforward_layernorm"}}[placement]
        for their_norm, our_norm in names.items():
            state[theirs + their_norm + ".weight"] = p[ours + our_norm + ".weight"]
        if "latent" in c:
            for theirs_name, ours_name in (("q_a_proj", "linear_q_down_proj"),
                                           ("q_a_layernorm", "q_layernorm"),
                                           ("q_b_proj", "linear_q_up_proj"), ("q_proj", "linear_q_proj"),
                                           ("kv_a_proj_with_mqa", "linear_kv_down_proj"),
                                           ("kv_a_layernorm", "kv_layernorm"),
                                           ("kv_b_proj", "linear_kv_up_proj")):
                if ours + f"self_attention.{ours_name}.weight" in p:
                    state[theirs + f"self_attn.{theirs_name}.weight"] = p[
                        ours + f"self_attention.{ours_name}.weight"]
        for kind in ("weight", "bias"):
            if ours + "self_attention.linear_qkv." + kind in p:
                parts = split_qkv(c, p[ours + "self_attention.linear_qkv." + kind])
                for letter, part in zip("qkv", parts):
                    state[theirs + f"self_attn.{letter}_proj.{kind}"] = part
        state[theirs + "self_attn.o_proj.weight"] = p[ours + "self_attention.linear_proj.weight"]
        if c["bias"]:
            state[theirs + "self_attn.o_proj.bias"] = p[ours + "self_attention.linear_proj.bias"]
        if "sinks" in c:
            state[theirs + "self_attn.sinks"] = p[ours + "self_attention.core_attention.softmax_offset"]
        if c["bias"] and not has_experts(c, i):
            gate, up = p[ours + "mlp.linear_fc1.bias"].chunk(2)
            state[theirs + "mlp.gate_proj.bias"], state[theirs + "mlp.up_proj.bias"] = gate, up
            state[theirs + "mlp.down_proj.bias"] = p[ours + "mlp.linear_fc2.bias"]
        elif c["qkv_bias"] and not c["bias"] and name != "qwen2_moe":
            state[theirs + "self_attn.o_proj.bias"] = torch.zeros(c["hidden"])
        if c["qk_norm"]:
            state[theirs + "self_attn.q_norm.weight"] = p[ours + "self_attention.q_layernorm.weight"]
            state[theirs + "self_attn.k_norm.weight"] = p[ours + "self_attention.k_layernorm.weight"]
        if has_experts(c, i):
            expert_weights(c, p, ours + "mlp.", theirs + "mlp.", state)
            continue
        gate, up = p[ours + "mlp.linear_fc1.weight"].chunk(2)
        state[theirs + "mlp.gate_proj.weight"], state[theirs + "mlp.up_proj.weight"] = gate, up
        state[theirs + "mlp.down_proj.weight"] = p[ours + "mlp.linear_fc2.weight"]
        if name.startswith("phi3"):
            state[theirs + "self_attn.qkv_proj.weight"] = torch.cat(
                [state.pop(theirs + f"self_attn.{letter}_proj.weight") for letter in "qkv"])
            state[theirs + "mlp.gate_up_proj.weight"] = torch.cat(
                [state.pop(theirs + f"mlp.{part}_proj.weight") for part in ("gate", "up")])
    return state


def hugging_face_logits(name, c, p, tokens):
    name = c.get("like", name)
    if name == "gpt2":
        model, state = gpt2_model(c, p)
    elif name == "gpt_neox":
        model, state = gpt_neox_model(c, p)
    else:
        model, state = decoder_model(name, c), decoder_weights(name, c, p)
    missing, unexpected = model.load_state_dict({k: v.detach().clone() for k, v in state.items()},
                                                strict=False)
    harmless = ("rotary", ".attn.bias", "embed_scale")
    assert not unexpected and all(any(word in m for word in harmless) for m in missing), (missing, unexpected)
    model.eval()
    with torch.no_grad():
        return model(tokens.long()).logits.double()


def values_of(c, seed):
    generator = torch.Generator().manual_seed(seed)
    # Values that bf16 holds exactly: the bf16 test then measures the computation,
    # not the rounding of its input.
    stored = {key: value.bfloat16().float() for key, value in make_parameters(c, generator).items()}
    text = torch.randint(0, c["vocab"], (STEPS, BATCH, SEQ + 1), generator=generator, dtype=torch.int32)
    return generator, stored, text


def seed_of(name, c):
    """With experts, a seed with which rounding to bf16 does not choose others for a token of the first batch.

    The margin of a router: the least difference of the logits of the last chosen and the first other expert,
    and of its experts: the least distance of a value from a limit of their activation.
    """
    first = sum(map(ord, name))
    if "moe" not in c or "seed" in c:
        return c.get("seed", first)

    def margin(seed):
        _, stored, text = values_of(c, seed)
        router = {"loss": 0, "margins": []}
        forward(c, {key: value.double() for key, value in stored.items()}, text[0][:, :-1].long(), router)
        return min(router["margins"])

    with torch.no_grad():
        return max(range(first, first + 1500), key=margin)


def make(name, c, write):
    generator, stored, text = values_of(c, seed_of(name, c))
    mask = (torch.rand(STEPS, BATCH, SEQ, generator=generator) > 0.2).to(torch.float32)
    p = {key: value.double().requires_grad_(not key.endswith("expert_bias"))
         for key, value in stored.items()}
    out = {"param." + key: value.clone() for key, value in stored.items()}
    out["text"], out["loss_mask"] = text, mask

    theirs = hugging_face_logits(name, c, stored, text[0][:, :-1])
    logits, losses, of_routers, later = token_losses(c, p, text[0].long(), mask[0])
    difference = (logits - theirs).abs().max().item() / theirs.abs().max().item()
    print(f"{name}: {sum(v.numel() for v in p.values())} parameters, loss {losses.mean():.6f}, "
          f"largest difference from Hugging Face's logits {difference:.1e} of the largest")
    assert difference < 1e-4

    loss, minimized = objective(c, losses, mask[0], of_routers, later)
    minimized.backward()
    if later:
        out["later_losses"] = torch.stack(later).detach()
    if c["rope"] and c["rope"].get("kind") == "longrope":  # the factors for short sequences
        few = text[0][:, :c["rope"]["original"]]
        theirs, ours = hugging_face_logits(name, c, stored, few), forward(c, p, few.long()).detach()
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
        out["short_logits"] = ours.float().flatten(0, 1)
    out["logits"], out["token_losses"] = logits.detach().float().flatten(0, 1), losses.detach().float()
    out["loss"] = loss.detach().reshape(1)
    for key, value in p.items():
        out["grad." + key] = torch.zeros_like(stored[key]) if value.grad is None else value.grad.float()
        value.grad = None

    optimizer = torch.optim.AdamW(
        [{"params": [v for key, v in p.items() if v.dim() > 1 and not key.endswith("bias")],
          "weight_decay": DECAY},
         {"params": [v for key, v in p.items() if v.dim() == 1 or key.endswith("bias")],
          "weight_decay": 0.0}],
        lr=LR, betas=BETAS, eps=EPS)
    history, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        _, losses, of_routers, later = token_losses(c, p, text[step].long(), mask[step])
        loss, minimized = objective(c, losses, mask[step], of_routers, later)
        minimized.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(p.values()), CLIP).detach())
        optimizer.step()
        history.append(loss.detach())
    out["step_losses"], out["step_grad_norms"] = torch.stack(history), torch.stack(norms)
    print("  losses " + " ".join(f"{v:.4f}" for v in history) + "; norms " +
          " ".join(f"{v:.2f}" for v in norms))
    if write:
        OUT.mkdir(exist_ok=True)
        path = OUT / (name + ".safetensors")
        save_file({k: v.contiguous() for k, v in out.items()}, path)
        path.chmod(0o644)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wanted = [word for word in sys.argv[1:] if word != "--check-only"] or list(MODELS)
    for model_name in wanted:
        make(model_name, MODELS[model_name], write="--check-only" not in sys.argv)

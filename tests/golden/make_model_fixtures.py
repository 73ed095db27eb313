#!/usr/bin/env python3
"""Golden fixtures of tiny language models: python3 tests/golden/make_model_fixtures.py [--check-only]

For each model of MODELS: parameters (fp32, under Capstan's names and in its layout), logits, loss, the gradient of every
parameter and the losses of ten AdamW steps, computed in fp64 by the plain PyTorch functions below, written to
tests/golden/models/NAME.safetensors. Before that the same weights are put into the Hugging Face implementation of the
architecture, whose logits must agree (to 1e-4: it works in fp32 inside).

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
    "gpt2": dict(hidden=48, layers=2, heads=6, groups=6, head_dim=8, ffn=116, vocab=131, positions=29, norm="layer",
                 eps=1e-5, act="gelu_tanh", gated=False, bias=True, qkv_bias=True, tied=True, rope=None, qk_norm=False,
                 window=None),
    "llama": dict(hidden=42, layers=3, heads=6, groups=2, head_dim=8, ffn=72, vocab=131, positions=None, norm="rms",
                  eps=1e-6, act="silu", gated=True, bias=False, qkv_bias=False, tied=False, rope=dict(base=10000.0),
                  qk_norm=False, window=None),
    "llama_variant": dict(hidden=48, layers=2, heads=6, groups=3, head_dim=10, ffn=56, vocab=131, positions=None, norm="rms",
                          eps=1e-5, act="silu", gated=True, bias=False, qkv_bias=True, tied=True,
                          rope=dict(base=100.0, factor=8.0, low=1.0, high=4.0, original=16), qk_norm=True, window=7),
}


def make_parameters(c, generator):
    """name -> fp32 tensor, Capstan's names and layout.

    The scales are such that gradients are well conditioned: PyTorch's own bf16 is within 2e-2 of fp64 for every parameter.
    """
    h, q, k = c["hidden"], c["heads"] * c["head_dim"], c["groups"] * c["head_dim"]
    normal = lambda *shape, std=0.1: torch.randn(*shape, generator=generator) * std
    p = {"embedding.word_embeddings.weight": normal(c["vocab"], h, std=0.5)}
    if c["positions"]:
        p["embedding.position_embeddings.weight"] = normal(c["positions"], h, std=0.3)

    def norm(name, width):
        p[name + ".weight"] = 1 + normal(width)
        if c["norm"] == "layer":
            p[name + ".bias"] = normal(width)

    def linear(name, out, inputs, bias):
        p[name + ".weight"] = normal(out, inputs, std=0.6 / math.sqrt(inputs))
        if bias:
            p[name + ".bias"] = normal(out)

    for i in range(c["layers"]):
        layer = f"decoder.layers.{i}."
        norm(layer + "input_layernorm", h)
        linear(layer + "self_attention.linear_qkv", q + 2 * k, h, c["qkv_bias"])
        if c["qk_norm"]:
            norm(layer + "self_attention.q_layernorm", c["head_dim"])
            norm(layer + "self_attention.k_layernorm", c["head_dim"])
        linear(layer + "self_attention.linear_proj", h, q, c["bias"])
        norm(layer + "pre_mlp_layernorm", h)
        linear(layer + "mlp.linear_fc1", c["ffn"] * (2 if c["gated"] else 1), h, c["bias"])
        linear(layer + "mlp.linear_fc2", h, c["ffn"], c["bias"])
    norm("decoder.final_layernorm", h)
    if not c["tied"]:
        p["output_layer.weight"] = normal(c["vocab"], h, std=1 / math.sqrt(h))
    return p


def apply_norm(c, p, name, x):
    if c["norm"] == "layer":
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + c["eps"]) * p[name + ".weight"] + p[name + ".bias"]
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c["eps"]) * p[name + ".weight"]


def inverse_frequencies(c):
    r, d = c["rope"], c["head_dim"]
    frequencies = [r["base"] ** (-2 * i / d) for i in range(d // 2)]
    if "factor" not in r:
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


def rotate(c, x):  # x [B, S, heads, d]
    half = c["head_dim"] // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * inverse_frequencies(c)[None, :]
    cos, sin = angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def activation(c, x):
    if c["act"] == "silu":
        return x * torch.sigmoid(x)
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, name, x):
    y = x @ p[name + ".weight"].T
    return y + p[name + ".bias"] if name + ".bias" in p else y


def forward(c, p, tokens):  # tokens [B, S] -> logits [B, S, V]
    b, s = tokens.shape
    per_group, d = c["heads"] // c["groups"], c["head_dim"]
    x = p["embedding.word_embeddings.weight"][tokens]
    if c["positions"]:
        x = x + p["embedding.position_embeddings.weight"][:s]
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    seen = distance >= 0
    if c["window"]:
        seen &= distance < c["window"]
    for i in range(c["layers"]):
        layer = f"decoder.layers.{i}."
        y = apply_norm(c, p, layer + "input_layernorm", x)
        qkv = linear(p, layer + "self_attention.linear_qkv", y).view(b, s, c["groups"], per_group + 2, d)
        q = qkv[..., :per_group, :].reshape(b, s, c["heads"], d)
        k, v = qkv[..., per_group, :], qkv[..., per_group + 1, :]
        if c["qk_norm"]:
            q = apply_norm(c, p, layer + "self_attention.q_layernorm", q)
            k = apply_norm(c, p, layer + "self_attention.k_layernorm", k)
        if c["rope"]:
            q, k = rotate(c, q), rotate(c, k)
        k, v = k.repeat_interleave(per_group, 2), v.repeat_interleave(per_group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, s, c["heads"] * d)
        x = x + linear(p, layer + "self_attention.linear_proj", out)
        y = linear(p, layer + "mlp.linear_fc1", apply_norm(c, p, layer + "pre_mlp_layernorm", x))
        if c["gated"]:
            gate, up = y.chunk(2, -1)
            y = activation(c, gate) * up
        else:
            y = activation(c, y)
        x = x + linear(p, layer + "mlp.linear_fc2", y)
    x = apply_norm(c, p, "decoder.final_layernorm", x)
    head = p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"]
    return x @ head.T


def token_losses(c, p, text):
    logits = forward(c, p, text[:, :-1])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten().long(), reduction="none")
    return logits, losses


# ---- the same weights in Hugging Face's models ---------------------------------------------------------------------------


def hugging_face_logits(name, c, p, tokens):
    import transformers

    def split_qkv(tensor):  # rows [groups, per_group + 2, d] -> q, k, v
        per_group, d = c["heads"] // c["groups"], c["head_dim"]
        t = tensor.view(c["groups"], per_group + 2, d, *tensor.shape[1:])
        rest = tensor.shape[1:]
        return (t[:, :per_group].reshape(-1, *rest), t[:, per_group].reshape(-1, *rest), t[:, per_group + 1].reshape(-1, *rest))

    state = {}
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c["vocab"], n_positions=c["positions"], n_embd=c["hidden"], n_layer=c["layers"], n_head=c["heads"],
            n_inner=c["ffn"], layer_norm_epsilon=c["eps"], activation_function="gelu_new", attn_implementation="eager"))
        state["transformer.wte.weight"] = state["lm_head.weight"] = p["embedding.word_embeddings.weight"]
        state["transformer.wpe.weight"] = p["embedding.position_embeddings.weight"]
        for i in range(c["layers"]):
            ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
            for kind in ("weight", "bias"):
                turn = (lambda t: t.T) if kind == "weight" else (lambda t: t)
                state[theirs + "ln_1." + kind] = p[ours + "input_layernorm." + kind]
                state[theirs + "ln_2." + kind] = p[ours + "pre_mlp_layernorm." + kind]
                state[theirs + "attn.c_attn." + kind] = turn(torch.cat(split_qkv(p[ours + "self_attention.linear_qkv." + kind])))
                state[theirs + "attn.c_proj." + kind] = turn(p[ours + "self_attention.linear_proj." + kind])
                state[theirs + "mlp.c_fc." + kind] = turn(p[ours + "mlp.linear_fc1." + kind])
                state[theirs + "mlp.c_proj." + kind] = turn(p[ours + "mlp.linear_fc2." + kind])
        for kind in ("weight", "bias"):
            state["transformer.ln_f." + kind] = p["decoder.final_layernorm." + kind]
    else:
        rope = dict(rope_theta=c["rope"]["base"], rope_type="default")
        if "factor" in c["rope"]:
            rope = dict(rope_theta=c["rope"]["base"], rope_type="llama3", factor=c["rope"]["factor"],
                        low_freq_factor=c["rope"]["low"], high_freq_factor=c["rope"]["high"],
                        original_max_position_embeddings=c["rope"]["original"])
        common = dict(vocab_size=c["vocab"], hidden_size=c["hidden"], num_hidden_layers=c["layers"],
                      num_attention_heads=c["heads"], num_key_value_heads=c["groups"], head_dim=c["head_dim"],
                      intermediate_size=c["ffn"], rms_norm_eps=c["eps"], tie_word_embeddings=c["tied"],
                      max_position_embeddings=64, rope_parameters=rope, attn_implementation="eager")
        if c["qk_norm"]:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
                attention_bias=True, use_sliding_window=True, sliding_window=c["window"], max_window_layers=0, **common))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
        state["model.embed_tokens.weight"] = p["embedding.word_embeddings.weight"]
        state["lm_head.weight"] = p["embedding.word_embeddings.weight"] if c["tied"] else p["output_layer.weight"]
        state["model.norm.weight"] = p["decoder.final_layernorm.weight"]
        for i in range(c["layers"]):
            ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
            state[theirs + "input_layernorm.weight"] = p[ours + "input_layernorm.weight"]
            state[theirs + "post_attention_layernorm.weight"] = p[ours + "pre_mlp_layernorm.weight"]
            for kind in ("weight", "bias"):
                if ours + "self_attention.linear_qkv." + kind in p:
                    parts = split_qkv(p[ours + "self_attention.linear_qkv." + kind])
                    for letter, part in zip("qkv", parts):
                        state[theirs + f"self_attn.{letter}_proj.{kind}"] = part
            state[theirs + "self_attn.o_proj.weight"] = p[ours + "self_attention.linear_proj.weight"]
            if c["qkv_bias"]:
                state[theirs + "self_attn.o_proj.bias"] = torch.zeros(c["hidden"])
            if c["qk_norm"]:
                state[theirs + "self_attn.q_norm.weight"] = p[ours + "self_attention.q_layernorm.weight"]
                state[theirs + "self_attn.k_norm.weight"] = p[ours + "self_attention.k_layernorm.weight"]
            gate, up = p[ours + "mlp.linear_fc1.weight"].chunk(2)
            state[theirs + "mlp.gate_proj.weight"], state[theirs + "mlp.up_proj.weight"] = gate, up
            state[theirs + "mlp.down_proj.weight"] = p[ours + "mlp.linear_fc2.weight"]
    missing, unexpected = model.load_state_dict({k: v.detach().clone() for k, v in state.items()}, strict=False)
    assert not unexpected and all("rotary" in m or m.endswith(".attn.bias") for m in missing), (missing, unexpected)
    model.eval()
    with torch.no_grad():
        return model(tokens.long()).logits.double()


def make(name, c, write):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    # Values that bf16 holds exactly: the bf16 test then measures the computation, not the rounding of its input.
    stored = {key: value.bfloat16().float() for key, value in make_parameters(c, generator).items()}
    text = torch.randint(0, c["vocab"], (STEPS, BATCH, SEQ + 1), generator=generator, dtype=torch.int32)
    mask = (torch.rand(STEPS, BATCH, SEQ, generator=generator) > 0.2).to(torch.float32)
    p = {key: value.double().requires_grad_() for key, value in stored.items()}
    out = {"param." + key: value.clone() for key, value in stored.items()}
    out["text"], out["loss_mask"] = text, mask

    theirs = hugging_face_logits(name, c, stored, text[0][:, :-1])
    logits, losses = token_losses(c, p, text[0].long())
    difference = (logits - theirs).abs().max().item() / theirs.abs().max().item()
    print(f"{name}: {sum(v.numel() for v in p.values())} parameters, loss {losses.mean():.6f}, "
          f"largest difference from Hugging Face's logits {difference:.1e} of the largest")
    assert difference < 1e-4

    flat = mask[0].double().flatten()
    loss = (losses * flat).sum() / flat.sum()
    loss.backward()
    out["logits"], out["token_losses"] = logits.detach().float().flatten(0, 1), losses.detach().float()
    out["loss"] = loss.detach().reshape(1)
    for key, value in p.items():
        out["grad." + key] = value.grad.float()
        value.grad = None

    optimizer = torch.optim.AdamW(
        [{"params": [v for v in p.values() if v.dim() > 1], "weight_decay": DECAY},
         {"params": [v for v in p.values() if v.dim() == 1], "weight_decay": 0.0}], lr=LR, betas=BETAS, eps=EPS)
    history, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        _, losses = token_losses(c, p, text[step].long())
        flat = mask[step].double().flatten()
        loss = (losses * flat).sum() / flat.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(p.values()), CLIP).detach())
        optimizer.step()
        history.append(loss.detach())
    out["step_losses"], out["step_grad_norms"] = torch.stack(history), torch.stack(norms)
    print("  losses " + " ".join(f"{v:.4f}" for v in history) + "; norms " + " ".join(f"{v:.2f}" for v in norms))
    if write:
        OUT.mkdir(exist_ok=True)
        path = OUT / (name + ".safetensors")
        save_file({k: v.contiguous() for k, v in out.items()}, path)
        path.chmod(0o644)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for model_name, model_config in MODELS.items():
        make(model_name, model_config, write="--check-only" not in sys.argv)

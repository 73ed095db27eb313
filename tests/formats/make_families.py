#!/usr/bin/env python3
"""Tiny random models of every family that Capstan reads:
python3 tests/formats/make_families.py [NAME…] [class_defaults]

Writes tests/formats/families/NAME/ as Transformers saves a model (config.json, generation_config.json,
safetensors), and NAME/expected.safetensors beside it: tokens, logits, the mean loss of the next token and the
gradient of every tensor, in fp32. class_defaults.json: config.json of every class without arguments, with all
that it takes where a key is missing. Sizes are odd on purpose.
Models with quantized weights are in tests/formats/quantized/NAME/. Needs torch, transformers, tokenizers,
safetensors.
"""

import copy
import json
import math
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

OUT = pathlib.Path(__file__).parent / "families"
BATCH, SEQ = 2, 13

COMMON = dict(hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=6, vocab_size=53, max_position_embeddings=64, rms_norm_eps=1e-5,
              bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA3 = dict(rope_theta=500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
LONG = dict(rope_theta=10000.0, rope_type="longrope", short_factor=[1.0, 1.05, 1.2],
            long_factor=[1.0, 1.5, 3.0])
NEOX = dict(hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4, vocab_size=53,
            max_position_embeddings=64, hidden_dropout=0.1, attention_dropout=0.05, bos_token_id=1,
            eos_token_id=2,
            rope_parameters=dict(rope_theta=500.0, rope_type="default", partial_rotary_factor=0.7))
NOT_THERE = object()  # the class has no such argument

# Latent attention; the norms of the compressed vectors have an epsilon of their own.
LATENT = dict(num_key_value_heads=4, head_dim=NOT_THERE, first_k_dense_replace=2, kv_lora_rank=9,
              qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=7)
# After a dense layer: eight experts in four groups, three of two groups for each token, and shared ones.
DEEPSEEK_EXPERTS = dict(num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2,
                        moe_intermediate_size=10, num_experts_per_tok=3, n_group=4, topk_group=2)
# PyTorch's complex numbers need even widths in V2.
LATENT_V2 = {**LATENT, "qk_nope_head_dim": 4, "kv_lora_rank": 10}
DEEPSEEK_YARN = dict(rope_theta=50.0, rope_type="yarn", factor=4.0, beta_fast=1.5, beta_slow=0.3,
                     original_max_position_embeddings=16)


def with_(**changes):
    return {key: value for key, value in {**COMMON, **changes}.items() if value is not NOT_THERE}


MODELS = {
    "gpt2": ("GPT2", dict(n_embd=24, n_head=4, n_layer=2, n_positions=19, n_inner=28, vocab_size=53,
                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)),
    # As the first GPT-2 lies on the hub: no prefix, and the masks among the weights.
    "gpt2_bare": ("GPT2", dict(n_embd=16, n_head=2, n_layer=1, n_positions=17, vocab_size=37, resid_pdrop=0.1,
                               embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2)),
    "llama": ("Llama", with_(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "llama_sharded": ("Llama", with_(num_hidden_layers=3)),
    "smollm2": ("Llama", with_(vocab_size=270, tie_word_embeddings=True)),
    "mistral": ("Mistral", with_(sliding_window=5)),
    "qwen2": ("Qwen2", with_(tie_word_embeddings=True, use_sliding_window=False, sliding_window=32,
                             max_window_layers=2)),
    "qwen3": ("Qwen3", with_(head_dim=10)),
    "olmo2": ("Olmo2", with_(head_dim=NOT_THERE)),
    "gemma2": ("Gemma2", with_(sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=5.0,
                               final_logit_softcapping=3.0)),
    "phi3": ("Phi3", with_(head_dim=NOT_THERE, pad_token_id=0, rope_parameters=dict(
        rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.67))),
    "phi3_long": ("Phi3", with_(head_dim=NOT_THERE, pad_token_id=0, max_position_embeddings=64,
                                original_max_position_embeddings=16, num_hidden_layers=1,
                                rope_parameters=LONG)),
    "mixtral": ("Mixtral", with_(num_local_experts=5, num_experts_per_tok=2, intermediate_size=14,
                                 sliding_window=5)),
    # The first layer is dense.
    "qwen3_moe": ("Qwen3Moe", with_(num_hidden_layers=3, num_experts=6, num_experts_per_tok=3,
                                    moe_intermediate_size=10, mlp_only_layers=[0], norm_topk_prob=True)),
    # Dense layers and layers with experts take turns.
    "qwen3_moe_turns": ("Qwen3Moe", with_(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2,
                                          moe_intermediate_size=10, mlp_only_layers=[0, 2],
                                          norm_topk_prob=True)),
    "olmoe": ("Olmoe", with_(head_dim=NOT_THERE, intermediate_size=10, num_experts=7, num_experts_per_tok=3,
                             norm_topk_prob=False)),
    # With an expert for all tokens, and its gate.
    "qwen2_moe": ("Qwen2Moe", with_(head_dim=NOT_THERE, num_experts=6, num_experts_per_tok=2,
                                    moe_intermediate_size=10, shared_expert_intermediate_size=18)),
    # Queries that are not compressed, as V2-Lite has them.
    "deepseek_v2": ("DeepseekV2", with_(**LATENT_V2, q_lora_rank=None, rope_parameters=dict(
        **DEEPSEEK_YARN, mscale=0.707, mscale_all_dim=0.707))),
    # V2-Lite: experts of any group.
    "deepseek_v2_lite": ("DeepseekV2", with_(**{**LATENT_V2, **DEEPSEEK_EXPERTS, "n_group": 1,
                                                "topk_group": 1}, q_lora_rank=None)),
    "deepseek_v2_moe": ("DeepseekV2", with_(**{**LATENT_V2, **DEEPSEEK_EXPERTS}, q_lora_rank=12,
                                            topk_method="group_limited_greedy", routed_scaling_factor=1.5)),
    "deepseek_v3_moe": ("DeepseekV3", with_(**{**LATENT, **DEEPSEEK_EXPERTS, "n_shared_experts": 1},
                                            q_lora_rank=11)),
    "deepseek_v3": ("DeepseekV3", with_(**LATENT, q_lora_rank=11, rope_parameters=dict(
        **DEEPSEEK_YARN, mscale=1.0, mscale_all_dim=0.8))),
    # Parallel attention and MLP; a part of each head turns.
    "gpt_neox": ("GPTNeoX", dict(NEOX)),
    # The same layers one after the other, without biases of attention, and tied.
    "gpt_neox_sequential": ("GPTNeoX", dict(NEOX, use_parallel_residual=False, attention_bias=False,
                                            tie_word_embeddings=True)),
    # Limits that clamp, and a window that hides.
    "gpt_oss": ("GptOss", with_(num_hidden_layers=3, intermediate_size=14, num_local_experts=5,
                                num_experts_per_tok=2, sliding_window=5, swiglu_limit=0.4,
                                rope_parameters=dict(**DEEPSEEK_YARN, truncate=False))),
    # The experts as the releases hold them; MXFP4 has blocks of 32.
    "gpt_oss_mxfp4": ("GptOss", with_(hidden_size=32, intermediate_size=64, num_local_experts=3,
                                      num_experts_per_tok=2, sliding_window=4,
                                      rope_parameters=dict(**DEEPSEEK_YARN, truncate=False))),
}


def fill(model, family, generator):
    """Weights of such scales that gradients are well conditioned."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                base = 0.0 if family == "Gemma2" or name.endswith("bias") else 1.0
                p.copy_(base + 0.1 * noise)
            elif name.endswith("bias"):
                p.copy_(0.1 * noise)
            elif "embed_" in name and "embed_out" not in name or "wte" in name or "wpe" in name:
                p.copy_(0.5 * noise)
            else:
                inputs = (p.shape[0] if family == "GPT2" and p.dim() == 2 and "lm_head" not in name
                          else p.shape[-2] if family == "GptOss" and p.dim() == 3 else p.shape[-1])
                p.copy_(0.6 / math.sqrt(inputs) * noise)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))


def v4_spelling(directory):
    """config.json as Transformers 4 wrote it."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.42.3"
    config["_name_or_path"] = "somebody/smol"
    config["rope_interleaved"] = False
    config["is_llama_config"] = True
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def add_tokenizer(directory):
    """A byte-level BPE tokenizer with a chat template, as such models carry one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the thin cat sat on the hat", "in the inn"] * 9,
        trainers.BpeTrainer(vocab_size=268, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                            show_progress=False, special_tokens=["<|endoftext|>", "<|im_start|>",
                                                                 "<|im_end|>"]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>",
                                                eos_token="<|im_end|>")
    fast.chat_template = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] "
                          "}}<|im_end|>\n{% endfor %}"
                          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    fast.save_pretrained(directory)


def mxfp4_experts(model, generator):
    """Random codes and scales of the experts, whose values the model gets; returns them by name."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    packed = {}
    for name, p in model.named_parameters():
        if p.dim() < 3:
            continue
        experts, inputs, outputs = p.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator)
        packed[name + "_blocks"], packed[name + "_scales"] = blocks.byte(), scales.byte()
        with torch.no_grad():
            p.copy_(convert_moe_packed_tensors(packed[name + "_blocks"], packed[name + "_scales"]))
    return packed


def pack_experts(directory, packed):
    tensors = load_file(directory / "model.safetensors")
    for name in packed:
        tensors.pop(name.removesuffix("_blocks"), None)
    save_file({**tensors, **packed}, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def gradients_of(model):
    """By the names of the tensors in files: in memory, the matrices of all experts are one tensor, and
    GPT-NeoX's head has another name."""
    gradients = {key: p.grad for key, p in model.named_parameters()}
    # Files hold the bias of experts, which has no gradient, beside the parameters.
    gradients.update((key, torch.zeros_like(b)) for key, b in model.named_buffers()
                     if key.endswith("e_score_correction_bias"))
    if model.config.model_type != "gpt_neox" and all(gradient.dim() < 3 for gradient in gradients.values()):
        return gradients
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, state_dict=gradients)
        return load_file(pathlib.Path(directory) / "model.safetensors")


def make(name):
    family, arguments = MODELS[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    config = getattr(transformers, family + "Config")(**arguments)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers,
                    family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM"))(config).float()
    fill(model, family, generator)
    packed = mxfp4_experts(model, generator) if name == "gpt_oss_mxfp4" else {}
    # Exports do not have the bytes of quantized files.
    directory = (OUT.parent / "quantized" if packed else OUT) / name
    directory.mkdir(parents=True, exist_ok=True)
    if name == "llama_sharded":  # of values that bf16 holds, on disk in bf16
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
        copy.deepcopy(model).bfloat16().save_pretrained(directory, max_shard_size="12KB")
    else:
        model.save_pretrained(directory)
    if name == "gpt2_bare":
        tensors = {key.removeprefix("transformer."): value
                   for key, value in load_file(directory / "model.safetensors").items()}
        tensors["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 17, 17))
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if packed:
        pack_experts(directory, packed)
    if name == "smollm2":
        v4_spelling(directory)
        add_tokenizer(directory)

    model.eval()
    tokens = torch.randint(0, config.vocab_size, (BATCH, SEQ + 1), generator=generator)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    out = {"tokens": tokens.int(), "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    for key, gradient in gradients_of(model).items():
        key = key.removeprefix("transformer.") if name == "gpt2_bare" else key
        out["grad." + key] = gradient
    save_file({key: value.contiguous() for key, value in out.items()}, directory / "expected.safetensors")
    for path in directory.iterdir():
        path.chmod(0o644)
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {loss.item():.6f}, "
          f"{sum(p.stat().st_size for p in directory.iterdir())} bytes")


def class_defaults():
    result = {}
    for family in sorted({family for family, _ in MODELS.values()}):
        config = getattr(transformers, family + "Config")().to_dict()
        if family == "DeepseekV2":  # the class has no default, and does not run without
            config["num_experts_per_tok"] = 6
        config["architectures"] = [family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM")]
        result[config["model_type"]] = {key: value for key, value in config.items()
                                        if key != "transformers_version"}
    (OUT.parent / "class_defaults.json").write_text(json.dumps(result, sort_keys=True,
                                                               separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model_name in sys.argv[1:] or [*MODELS, "class_defaults"]:
        class_defaults() if model_name == "class_defaults" else make(model_name)

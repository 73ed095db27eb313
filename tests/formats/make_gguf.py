#!/usr/bin/env python3
"""GGUF files as others write them: python3 tests/formats/make_gguf.py

Writes tests/formats/gguf/: blocks.gguf, a tensor of each type that is read, with blocks.safetensors, what
gguf's own reference makes of it; rounded.safetensors, values and the bytes that the reference makes of them
for each type that is written; smollm2.gguf, the model families/smollm2 as llama.cpp's converter lays it out,
tokenizer included; gpt_oss.gguf, likewise the model quantized/gpt_oss_mxfp4 without one; and spm.json, a
SentencePiece model as a tokenizer.json of Llama's, Mistral's and Gemma's making, with the ids that the
package tokenizers gives some texts. Needs gguf, numpy, safetensors, sentencepiece, tokenizers.
"""

import json
import pathlib

import gguf
import numpy as np
import sentencepiece
import tokenizers
from gguf import quants
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent
OUT = HERE / "gguf"


def blocks():
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(OUT / "blocks.gguf", "llama")
    expected = {}
    types = gguf.GGMLQuantizationType
    for kind in (types.F32, types.F16, types.BF16, types.Q4_0, types.Q4_1, types.Q8_0):
        values = rng.normal(size=(3, 64)).astype(np.float32)
        values[1, :32] = 0
        data = quants.quantize(values, kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        expected[kind.name] = quants.dequantize(data, kind).astype(np.float32)
    for kind, size, halves in ((types.Q4_K, 144, (0, 2)),
                               (types.Q6_K, 210, (208,))):  # no writer: any bytes are blocks
        data = rng.integers(0, 256, size=(3, 2 * size), dtype=np.uint8)
        for row in range(3):
            for block in range(2):
                for at in halves:
                    scale = np.float16(rng.normal() * 0.01).tobytes()
                    data[row, block * size + at:block * size + at + 2] = np.frombuffer(scale, dtype=np.uint8)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        expected[kind.name] = quants.dequantize(data, kind).astype(np.float32)
    # Every pair of codes, and the exponents at both ends.
    data = rng.integers(0, 256, size=(3, 2 * 17), dtype=np.uint8)
    data[:, ::17] = [[0, 1], [2, 126], [127, 250]]
    writer.add_tensor(types.MXFP4.name, data, raw_dtype=types.MXFP4)
    expected[types.MXFP4.name] = quants.dequantize(data, types.MXFP4).astype(np.float32)
    write(writer)
    save_file(expected, OUT / "blocks.safetensors")


def rounded():
    """Ties, powers of two, tiny and large numbers, and noise, which has to be rounded everywhere."""
    rng = np.random.default_rng(11)
    values = rng.normal(size=(6, 64)).astype(np.float32)
    values[1] *= 1e-6
    values[2] = np.arange(-32, 32) / 64 + np.float32(2.0**-12)
    values[3, :32] = 0
    values[3, 32:] = 1 + (np.arange(32) + 0.5) * np.float32(2.0**-8)  # between two of bf16
    values[4] = np.where(np.arange(64) % 2, 65504, -1) * np.float32(1)
    values[5] = np.linspace(-127.5, 127, 64)
    types = gguf.GGMLQuantizationType
    tensors = {"values": values}
    for kind in (types.F32, types.F16, types.BF16, types.Q8_0):
        tensors[kind.name] = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8).reshape(-1)
    save_file(tensors, OUT / "rounded.safetensors")


TEXTS = ["the cat sat", " the thin hat", "a  b\n c\n\n", "ångström 12 345 €uro \U0001f600", "x", "",
         "the the\tthe", "▁a ▁ b", "internationalisation of everything that there is"]


def spm():
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(HERE.parent / "text/tokenizer/families/spm_bpe.model"))
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    special = [i for i in range(len(pieces)) if model.is_control(i) or model.is_unknown(i)]
    # As Transformers turns scores into merges: every way to make a piece of two, in the order of the scores.
    merges = []
    for piece in sorted((p for p in pieces if ids[p] not in special and not model.is_byte(ids[p])),
                        key=lambda p: -model.get_score(ids[p])):
        merges += [[piece[:i], piece[i:]] for i in range(1, len(piece)) if piece[:i] in ids
                   and piece[i:] in ids]
    full = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i], "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True} for i in special],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": ids, "merges": merges}}
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
    stages = {
        "llama": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blank]}, None),
        "metaspace": (None, {**metaspace, "prepend_scheme": "first"}),
        "metaspace_always": (None, {**metaspace, "prepend_scheme": "always"}),
        "metaspace_never": (None, {**metaspace, "prepend_scheme": "never"}),
        "gemma": (blank, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                          "invert": False})}
    result = {"tokenizer": full, "texts": TEXTS, "stages": {}}
    for name, (normalizer, pre_tokenizer) in stages.items():
        full = {**full, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(full))
        result["stages"][name] = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                                  "ids": [tokenizer.encode(text).ids for text in TEXTS]}
    (OUT / "spm.json").write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")


def permute(weights, heads):  # of convert_hf_to_gguf
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2,
                           *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def add_sizes(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def smollm2():
    source = HERE / "families" / "smollm2"
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tensors = load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(OUT / "smollm2.gguf", "llama")
    writer.add_name("smol")
    add_sizes(writer, config)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    rows = config["vocab_size"]
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [gguf.TokenType.UNUSED] * rows
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}
    for name, value in sorted(tensors.items()):
        if name == "model.embed_tokens.weight":
            name = "token_embd.weight"
        elif name == "model.norm.weight":
            name = "output_norm.weight"
        else:
            layer, module = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if module == "self_attn.q_proj":
                value = permute(value, config["num_attention_heads"])
            if module == "self_attn.k_proj":
                value = permute(value, config["num_key_value_heads"])
            name = f"blk.{layer}.{names[module]}.weight"
        writer.add_tensor(name, np.ascontiguousarray(value))
    write(writer)


def mxfp4(codes, exponents):
    """ggml's blocks: an exponent, then codes i and i + 16 in a byte. `codes` has two neighbors in one."""
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
    packed = values[..., :16] | values[..., 16:] << 4
    return np.concatenate([exponents[..., None], packed], axis=-1).reshape(*codes.shape[:2], -1)


def gpt_oss():
    source = HERE / "quantized" / "gpt_oss_mxfp4"
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(OUT / "gpt_oss.gguf", gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT_OSS])
    add_sizes(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])

    def add(name, value, **kind):
        stem, dot, suffix = name.rpartition(".")
        writer.add_tensor(names.get_name(stem) + dot + suffix, np.ascontiguousarray(value), **kind)
    for name, value in sorted(tensors.items()):
        if name.endswith(".sinks"):
            add(name + ".weight", value)
        elif name.endswith("_scales"):
            packed = mxfp4(tensors[name.replace("_scales", "_blocks")], value)
            if name.endswith("gate_up_proj_scales"):
                for i, part in enumerate(("gate_proj", "up_proj")):
                    add(name.replace("gate_up_proj_scales", part + ".weight"), packed[:, i::2],
                        raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            else:
                add(name.replace("_scales", ".weight"), packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif name.endswith("gate_up_proj_bias"):
            for i, part in enumerate(("gate_proj", "up_proj")):
                add(name.replace("gate_up_proj_bias", part + ".bias"), value[:, i::2])
        elif name.endswith("down_proj_bias"):
            add(name.replace("_bias", ".bias"), value)
        elif not name.endswith("_blocks"):
            add(name, value)
    write(writer)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    blocks()
    rounded()
    smollm2()
    gpt_oss()
    spm()
    for path in sorted(OUT.iterdir()):
        path.chmod(0o644)
        print(path.name, path.stat().st_size)

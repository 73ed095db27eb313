#!/usr/bin/env python3
"""Adapters as PEFT saves them, for the models of make_families.py:
python3 tests/formats/make_adapters.py [NAME…]

Writes tests/formats/adapters/NAME/ (adapter_config.json, adapter_model.safetensors), NAME/merged.safetensors:
the weights that PEFT's merge makes of the adapted modules, and NAME/expected.safetensors: tokens, the logits
and mean loss of the first batch, the gradients of all that trains, and the losses of a few steps of AdamW,
computed in fp64 and kept in fp32. Needs torch, transformers, peft, safetensors; `mixtral` needs transformers
4, in which each matrix of an expert is a module.
"""

import copy
import json
import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
STEPS, BATCH, SEQ = 10, 2, 13
LR, DECAY, PLUS = 3e-3, 0.1, 4.0
SCALE = 0.2  # of A and B: no softmax is nearly one-hot, so that gradients are well conditioned
ADAPTERS = {
    "lora": ("llama", dict(r=3, lora_alpha=6,
                           target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                           "down_proj"])),
    "rslora_all": ("llama", dict(r=4, lora_alpha=5, use_rslora=True,
                                 target_modules=["q_proj", "k_proj", "v_proj", "o_proj",
                                                "gate_proj", "up_proj", "down_proj"])),
    "rslora": ("llama", dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj"],
                              rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 7})),
    # The first pattern that fits counts, not the longest, and ^ stands for the beginning of the full name.
    "patterns": ("llama", dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"],
                                rank_pattern={"v_proj": 3, "layers.0.self_attn.v_proj": 1},
                                alpha_pattern={"^self_attn.v_proj": 9, "q_proj": 7,
                                               "layers.1.self_attn.q_proj": 5})),
    "dora": ("llama", dict(r=2, lora_alpha=4, use_dora=True,
                           target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])),
    "dora_part": ("llama", dict(r=3, lora_alpha=3, use_dora=True,
                                target_modules=["q_proj", "v_proj", "up_proj", "o_proj"])),
    "phi3": ("phi3", dict(r=3, lora_alpha=6, use_dora=True,
                          target_modules=["qkv_proj", "gate_up_proj", "down_proj"])),
    "gpt_neox": ("gpt_neox", dict(r=3, lora_alpha=6, target_modules=["query_key_value", "dense",
                                                                    "dense_h_to_4h", "dense_4h_to_h"])),
    "mixtral": ("mixtral", dict(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj", "w1", "w2", "w3"])),
    "gpt2": ("gpt2", dict(r=2, lora_alpha=4, fan_in_fan_out=True, target_modules=["c_attn", "c_fc"])),
}


def train(model, tokens, plus=1.0):
    """Losses of AdamW; vectors do not decay, B learns `plus` times faster."""
    def group(chosen, lr, decay):
        return dict(params=[p for key, p in model.named_parameters() if p.requires_grad and chosen(key)],
                    lr=lr, weight_decay=decay)
    groups = [group(lambda key: "lora_A" in key, LR, DECAY),
              group(lambda key: "lora_B" in key, plus * LR, DECAY),
              group(lambda key: "magnitude" in key, LR, 0.0)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = tokens[step * BATCH:(step + 1) * BATCH]
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def expected(model, generator):
    model = copy.deepcopy(model).double()
    tokens = torch.randint(3, 53, (STEPS * BATCH, SEQ + 1), generator=generator)
    result = {"tokens": tokens.to(torch.int32)}
    first = tokens[:BATCH]
    result["logits"] = model(first[:, :-1]).logits.detach()
    loss = model(first, labels=first).loss
    loss.backward()
    result["loss"] = loss.detach().reshape(1)
    for key, p in model.named_parameters():
        if p.requires_grad:
            key = key.removeprefix("base_model.model.").replace(".default", "")
            result["gradient." + key.removesuffix(".weight")] = p.grad.clone()
    before = copy.deepcopy(model.state_dict())
    result["losses"] = train(model, tokens)
    model.load_state_dict(before)
    result["losses_plus"] = train(model, tokens, PLUS)
    model.load_state_dict(before)
    return {key: value.float().contiguous() if value.is_floating_point() else value
            for key, value in result.items()}


def make(name):
    base, arguments = ADAPTERS[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "families" / base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **arguments)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(p * (1 + 0.1 * noise) if "magnitude" in key else SCALE * noise)
    directory = HERE / "adapters" / name
    model.save_pretrained(directory)
    path = directory / "adapter_config.json"  # the same on every machine
    config = json.loads(path.read_text())
    config["base_model_name_or_path"], config["target_modules"] = base, sorted(config["target_modules"])
    for patterns in ("rank_pattern", "alpha_pattern"):  # PEFT sorts its file, and so forgets their order
        config[patterns] = arguments.get(patterns, {})
    path.write_text(json.dumps(config, indent=2) + "\n")
    save_file(expected(model, generator), directory / "expected.safetensors")
    modules = {key.split(".lora_A")[0].removeprefix("base_model.model.")
               for key, _ in model.named_parameters() if ".lora_A" in key}
    merged = model.merge_and_unload().state_dict()
    save_file({key + ".weight": merged[key + ".weight"].contiguous() for key in sorted(modules)},
              directory / "merged.safetensors")
    (directory / "README.md").unlink(missing_ok=True)
    for path in directory.iterdir():
        path.chmod(0o644)
    print(name, len(modules), "modules", sum(p.stat().st_size for p in directory.iterdir()), "bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for adapter in sys.argv[1:] or ADAPTERS:
        make(adapter)

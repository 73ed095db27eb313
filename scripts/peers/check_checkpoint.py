"""The safetensors library on our shards, with the manifest put together by numpy.

    python scripts/peers/check_checkpoint.py CHECKPOINT_DIR | BUILD_DIR

Opens every shard with `safetensors`, checks that each chunk of the manifest is there with its type and shape,
assembles each tensor and checks that every element was written exactly once. With a build directory, the
sample of test_checkpoint is made first: four ranks, flat ranges, rows and columns, in which element i of a
tensor is i.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors import safe_open

TYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "u8": torch.uint8,
    "i8": torch.int8, "u16": torch.uint16, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}


def sample(build_dir):
    out = tempfile.mkdtemp(prefix="capstan-peers-")
    subprocess.run(
        [build_dir / "test_checkpoint", "--test-case=*check_checkpoint*"],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CAPSTAN_PEER_OUT": out},
    )
    return pathlib.Path(out) / "step-00000009"


def main(path):
    counting = (path / "test_checkpoint").exists()
    if counting:
        path = sample(path)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    shards = {name: safe_open(path / name, "pt") for name in manifest["files"]
              if name.endswith(".safetensors")}
    for name, size in ((name, entry["bytes"]) for name, entry in manifest["files"].items()):
        assert (path / name).stat().st_size == size, name
    listed = set()
    for name, tensor in manifest["tensors"].items():
        full = torch.zeros(tensor["shape"], dtype=torch.float64)
        times = np.zeros(tensor["shape"], dtype=np.int64)
        for chunk in tensor["pieces"]:
            stored = shards[chunk["file"]].get_tensor(chunk["key"])
            listed.add((chunk["file"], chunk["key"]))
            assert (stored.dtype == TYPES[tensor["dtype"]]
                    and list(stored.shape) == chunk["sizes"]), (name, chunk)
            where = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"]))
            full[where] = stored.to(torch.float64)
            times[where] += 1
        assert (times == 1).all(), name
        if counting:
            expected = torch.arange(full.numel(), dtype=torch.float64).reshape(full.shape)
            assert torch.equal(full, expected), name
    stored = {(name, key) for name, shard in shards.items() for key in shard.keys()}
    assert stored == listed, stored ^ listed
    print(f"{len(manifest['tensors'])} tensors in {len(listed)} chunks of {len(shards)} shards: each element "
          "once, as promised")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))

"""TensorBoard's own reader on our event files, against metrics.jsonl beside them.

    python scripts/peers/check_events.py RUN_DIR [TAG=COLUMN …]

Reads every event file of RUN_DIR the way TensorBoard does (CRC of each record, several files, restarts) and
compares the scalar series with the columns of RUN_DIR/metrics.jsonl: the same steps, and values equal as
32-bit floats. Without tags named, each column that is also a tag is compared. With BUILD_DIR instead of
RUN_DIR the sample of test_records is made first.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensorboard.backend.event_processing import event_accumulator


def sample(build_dir):
    out = tempfile.mkdtemp(prefix="capstan-peers-")
    subprocess.run(
        [build_dir / "test_records", "--test-case=*check_events*"],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CAPSTAN_PEER_OUT": out},
    )
    return pathlib.Path(out) / "events"


def main(run, pairs):
    if (run / "test_records").exists():
        run = sample(run)
    accumulator = event_accumulator.EventAccumulator(str(run), size_guidance={event_accumulator.SCALARS: 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    with open(run / "metrics.jsonl", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if "event" not in row]
    if not pairs:
        pairs = [(tag, tag) for tag in tags if any(tag in row for row in rows)]
    if not pairs:
        sys.exit(f"{run}: no tag of {tags} is a column of metrics.jsonl")
    for tag, column in pairs:
        seen = {event.step: event.value for event in accumulator.Scalars(tag)}
        logged = {row["step"]: row[column] for row in rows if column in row}
        missing = sorted(set(logged) - set(seen))
        if missing:
            sys.exit(f"{tag}: steps {missing[:5]} of metrics.jsonl have no event")
        last = max(logged)
        orphans = [step for step in seen if step > last]
        if orphans:
            sys.exit(f"{tag}: events at steps {orphans[:5]} behind the last row of metrics.jsonl")
        for step, value in logged.items():
            same = not math.isfinite(seen[step]) if value is None else np.float32(value) == np.float32(
                seen[step])
            if not same:
                sys.exit(f"{tag} at step {step}: event {seen[step]}, metrics.jsonl {value}")
        print(f"{tag}: {len(logged)} steps equal")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), [tuple(argument.split("=", 1)) for argument in sys.argv[2:]])

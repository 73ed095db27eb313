#!/usr/bin/env bash
# Looks at the pages of `sweep plot`, at 24 and at 500 trials, and of `runs plot` with a browser: plans the
# sweeps, fills them with stored metrics as if they had run, and opens the pages in headless Chromium, wide
# and narrow, light and dark. Fails on a message in the console, a page above 5 MB, or one that takes more
# than two seconds to draw. Needs Debian's chromium, and Python for the metrics.
#
#   scripts/peers/report.sh [PROGRAM] [DIR]      default build/release/capstan, build/report;
#                                                DIR/*.png are the screenshots
set -euo pipefail
cd "$(dirname "$0")/../.."
capstan=$(realpath "${1:-build/release/capstan}")
dir=${2:-build/report}
command -v chromium >/dev/null || { echo "report.sh: no chromium (apt-get install chromium)" >&2; exit 2; }
rm -rf "$dir"
mkdir -p "$dir"
dir=$(realpath "$dir")

plan() { # NAME ARGUMENT…
  local name=$1
  shift
  "$capstan" sweep plan quickstart dataset=mock tokenizer=none train.train_iters=4000 optimizer.min_lr=1e-5 \
    "$@" --out "$dir/$name" >/dev/null
  python3 - "$dir/$name" <<'END'
import json, math, pathlib, random, sys
sweep = pathlib.Path(sys.argv[1])
random.seed(5)
journal = open(sweep / "journal.jsonl", "a")
for i, trial in enumerate(json.load(open(sweep / "plan.json"))["trials"]):
    values = dict(trial["values"])
    place = sweep / "trials" / trial["id"]
    layers = float(values.get("model.num_layers", 4))
    off = math.log10(float(values.get("optimizer.lr", 1e-3))) + 2.9 + layers / 40
    end = 2.6 + 0.9 * off * off - 0.08 * layers + random.gauss(0, 0.02)
    state, reason, last = "done", "", 400
    if off > 0.75 and i % 3 == 0:
        state, reason, last = "pruned", "rung at step 1000: 31st of 40, 13 go on", 100
    elif off > 0.85 and i % 7 == 1:
        state, reason, last = "failed", "exit code 1", 130
    (place / "run").mkdir()
    (place / "attempts" / "1").mkdir(parents=True)
    with open(place / "run" / "metrics.jsonl", "w") as rows:
        for row in range(1, last + 1):
            loss = end + (8.5 - end) * math.exp(-row / 60) + random.gauss(0, 0.05)
            if state == "failed":
                loss += 0.01 * math.exp(row / 18)
            rows.write(json.dumps({"step": 10 * row, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3,
                                   "tokens_per_second": 40000 / layers + random.gauss(0, 200),
                                   "step_seconds": 0.1, "memory_bytes": int(6e7 * layers)}) + "\n")
            if row % 40 == 0:  # trials are ranked by their validation
                rows.write(json.dumps({"step": 10 * row, "event": "validation", "loss": loss + 0.2}) + "\n")
    result = {"state": state, "reason": reason, "seconds": 100 + 9 * layers}
    (place / "attempts" / "1" / "result.json").write_text(json.dumps(result))
    (place / "state").write_text(state + "\n")
    journal.write(json.dumps({"trial": trial["id"], "state": state}) + "\n")
END
}

passed=0 failed=0
expect() { # TEXT CONDITION…
  local text=$1
  shift
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $text"; fi
}

look_at_sweep() { # NAME TRIALS
  local name=$1 trials=$2
  expect "$name: not $trials trials" \
    test "$(find "$dir/$name/trials" -mindepth 1 -maxdepth 1 | wc -l)" = "$trials"
  "$capstan" sweep plot "$dir/$name" -o "$dir/$name.html" >/dev/null
  look "$name"
}

look_at_runs() { # SWEEP: six of its trials as runs
  python3 - "$dir/$1" "$dir/runs" <<'END'
import json, math, pathlib, random, shutil, sys
sweep, runs = map(pathlib.Path, sys.argv[1:])
for i, trial in enumerate(json.load(open(sweep / "plan.json"))["trials"][:6]):
    run = runs / f"run-{i}"
    shutil.copytree(sweep / "trials" / trial["id"] / "run", run)
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    # The first two have experts.
    for layer, row in ((layer, row) for row in rows for layer in range(12) if i < 2 and "event" not in row):
        share = [math.exp(random.gauss(0, 0.5)) for _ in range(64)]
        row[f"expert_load_layer_{layer}"] = [one / sum(share) for one in share]
    with open(run / "metrics.jsonl", "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    (run / "run.json").write_text(json.dumps({
        "schema": "capstan.run/1", "id": f"{i:016x}", "recipe": "quickstart", "checkpoints": "checkpoints",
        "created": "2026-01-31T12:34:56Z", "started": "2026-01-31T12:34:56Z", "ended": "",
        "state": "finished", "reason": "", "starts": 1}))
END
  "$capstan" runs plot "$dir"/runs/run-* -o "$dir/runs.html" >/dev/null
  look runs
}

look() { # NAME
  local name=$1 page=$dir/$1.html
  local options=(--headless --no-sandbox --disable-gpu --hide-scrollbars "--window-size=1280,2300"
    "--user-data-dir=$dir/profile" --enable-logging=stderr --v=0)
  chromium "${options[@]}" --screenshot="$dir/$name.png" "file://$page" 2>"$dir/$name.log" >/dev/null
  chromium "${options[@]}" --window-size=500,2300 --blink-settings=preferredColorScheme=0 \
    --screenshot="$dir/$name-narrow-dark.png" "file://$page" 2>>"$dir/$name.log" >/dev/null
  # From the start of the load to the first complete picture; the shortest of five, because other work on
  # the machine counts too. Without a budget of time Chromium may write a small page before its first frame.
  local drawn='' size
  for _ in 1 2 3 4 5; do
    chromium "${options[@]}" --virtual-time-budget=5000 --dump-dom "file://$page" 2>>"$dir/$name.log" \
      >"$dir/$name.dom"
    drawn=$({ echo "$drawn"; sed -n 's/.*data-drawn-ms="\([0-9]*\)".*/\1/p' "$dir/$name.dom" | head -1; } |
      grep . | sort -n | head -1 || true)
    [ "${drawn:-9999}" -lt 1000 ] && break
  done
  size=$(stat -c %s "$page")
  echo "$name: $size bytes, drawn after ${drawn:-never} ms, $dir/$name.png"
  expect "$name: the page was not drawn to its end" test -n "$drawn"
  expect "$name: drawing took ${drawn:-?} ms" test "${drawn:-9999}" -lt 2000
  expect "$name: $size bytes" test "$size" -lt 5000000
  expect "$name: the console says $(grep CONSOLE "$dir/$name.log" | head -3)" \
    test -z "$(grep CONSOLE "$dir/$name.log")"
}

plan small 'optimizer.lr=1e-4,3e-4,1e-3,3e-3' model.num_layers=2,4,6 rng.seed=1,2
plan large 'optimizer.lr=loguniform(1e-4,1e-2)' 'optimizer.weight_decay=uniform(0,0.2)' \
  model.num_layers=2,4,6,8 train.global_batch_size=8,16,32 \
  'optimizer.adam_beta2=uniform(0.9,0.999)' rng.seed=1,2 --trials 250
look_at_sweep small 24
look_at_sweep large 500
look_at_runs small
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]

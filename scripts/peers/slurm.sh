#!/usr/bin/env bash
# Runs a sweep of four trials through a real Slurm: its daemons on this machine, in a temporary directory,
# with ports and a key of their own. One trial is signaled while it trains, saves, goes back to the queue and
# continues. Needs Debian's slurm-wlm and munge (apt-get install slurm-wlm munge) and root. Some five minutes:
# Slurm lets a requeued job wait.
#
#   scripts/peers/slurm.sh [PROGRAM]      default build/release/capstan; KEEP=1 leaves the directory behind
set -euo pipefail
cd "$(dirname "$0")/../.."
capstan=$(realpath "${1:-build/release/capstan}")
for program in munged slurmctld slurmd sbatch; do
  if ! PATH=$PATH:/usr/sbin command -v "$program" >/dev/null; then
    echo "slurm.sh: no $program (apt-get install slurm-wlm munge)" >&2
    exit 2
  fi
done
PATH=$PATH:/usr/sbin

dir=$(mktemp -d /tmp/capstan-slurm-XXXXXX)
chmod 755 "$dir"
pids=()
clean_up() {
  local code=$?
  if [ -e "$dir/slurm.conf" ]; then
    scancel --quiet --user root 2>/dev/null || true
    for _ in $(seq 30); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 1; done
  fi
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  if [ "${KEEP:-0}" = 1 ] || [ "$code" -ne 0 ]; then echo "left behind: $dir"; else rm -rf "$dir"; fi
  exit "$code"
}
trap clean_up EXIT

# ---- daemons
host=$(hostname -s)
mkdir -m 700 "$dir/munge" "$dir/state" "$dir/spool"
head -c 1024 /dev/urandom >"$dir/munge/key"
chmod 400 "$dir/munge/key"
munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge.socket" \
  --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" \
  >"$dir/munge/out" 2>&1 &
pids+=($!)
cat >"$dir/slurm.conf" <<END
ClusterName=capstan
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,batch_sched_delay=1
MaxArraySize=301
KillWait=10
ReturnToService=2
MpiDefault=none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$dir/slurm.conf
for _ in $(seq 50); do [ -S "$dir/munge.socket" ] && break; sleep 0.1; done
slurmctld -D -f "$SLURM_CONF" >"$dir/slurmctld.out" 2>&1 &
pids+=($!)
slurmd -D -f "$SLURM_CONF" -N "$host" >"$dir/slurmd.out" 2>&1 &
pids+=($!)
for _ in $(seq 150); do
  [ "$(sinfo -h -o %t 2>/dev/null | head -1)" = idle ] && break
  sleep 0.2
done
sinfo
if [ "$(sinfo -h -o %t | head -1)" != idle ]; then
  echo "FAILED: the node does not come up"
  tail -5 "$dir"/slurmd.log "$dir"/slurmctld.log
  exit 1
fi

# ---- the sweep
sweep=$dir/sweep
tiny=(model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 model.num_query_groups=2
  model.ffn_hidden_size=64 model.seq_length=32)
"$capstan" sweep plan quickstart dataset=mock tokenizer=none "${tiny[@]}" \
  train.train_iters="${STEPS:-3000}" logger.log_interval=20 checkpoint.save_interval=null \
  optimizer.lr=1e-3,3e-3 rng.seed=1,2 --out "$sweep"
printf 'partition: all\ntime: 30m\ncpus_per_rank: 1\n' >"$dir/cluster.yaml"
"$capstan" sweep slurm "$sweep" --cluster "$dir/cluster.yaml" --submit
if "$capstan" sweep slurm "$sweep" | grep -q .; then
  echo "FAILED: trials in the queue are offered again"
  exit 1
fi
job=$(sed -n 's/.*"job":"\([0-9]*\)".*/\1/p' "$sweep/slurm/jobs.jsonl")
first=$(sed -n 1p "$sweep/slurm/array-0.map")

# Signal the first trial when it has trained a while.
for _ in $(seq 600); do
  [ "$(wc -l 2>/dev/null <"$sweep/trials/$first/run/metrics.jsonl" || echo 0)" -ge 5 ] && break
  sleep 0.1
done
scancel --batch --signal=USR1 "${job}_1" || true  # it may say so and do it all the same; the journal tells
echo "signaled ${job}_1"
for _ in $(seq 300); do
  grep -q "\"trial\": *\"$first\".*\"state\": *\"pending\"" "$sweep/journal.jsonl" && break
  sleep 0.2
done
"$capstan" sweep status "$sweep"
scontrol show job "${job}_1" | grep -E "JobState|Restarts" || true

for _ in $(seq 400); do
  [ -z "$(squeue -h)" ] && break
  sleep 2
done
squeue
"$capstan" sweep status "$sweep"
"$capstan" sweep table "$sweep"

# ---- what is expected
fail() { echo "FAILED: $1"; tail -n 20 "$sweep"/slurm/*.txt; exit 1; }
[ "$(cat "$sweep"/trials/*/state | sort | uniq -c | tr -s ' ')" = " 4 done" ] ||
  fail "not all trials are done"
[ "$(grep -c '"state": *"done"' "$sweep/journal.jsonl")" = 4 ] ||
  fail "a trial is done more than once, or none"
[ -d "$sweep/trials/$first/attempts/2" ] || fail "the signaled trial has no second attempt"
grep -q resum "$sweep/trials/$first/attempts/2/log.txt" ||
  fail "the second attempt did not continue from the checkpoint"
[ "$(find "$sweep/trials" -path "*/attempts/2" | wc -l)" = 1 ] || fail "another trial ran twice"
[ -z "$("$capstan" sweep slurm "$sweep")" ] || fail "there is something left to submit"
echo "4 passed, 0 failed"

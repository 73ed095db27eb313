#!/bin/bash
#SBATCH --job-name=lr___batch-3
#SBATCH --array=1,3%2
#SBATCH --output="/scratch/it's 100%% \"mine\"/slurm/%A_%a.txt"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-task=1
#SBATCH --time=121
#SBATCH --partition=cpu
#SBATCH --account=language
#SBATCH --qos=long
#SBATCH --constraint=avx512
#SBATCH --reservation=night
#SBATCH --mem=64G
#SBATCH --mail-type=FAIL
#SBATCH --exclusive

# Task N runs the trial of line N of the map. A signal asks the trial to save; then this task goes back to the
# queue, and the trial continues from its checkpoint.
sweep='/scratch/it'\''s 100% "mine"'
capstan=/opt/capstan/bin/capstan
export SLURM_MPI_TYPE=pmix
module load openmpi
ulimit -c 0

trial=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$sweep/slurm/array-3.map")
if [ -z "$trial" ]; then
  echo "the map has no line $SLURM_ARRAY_TASK_ID" >&2
  exit 2
fi
runner='' asked=no requeue=yes
trap 'asked=yes; [ -z "$runner" ] || kill -USR1 "$runner" 2>/dev/null' USR1
trap 'asked=yes requeue=no; [ -z "$runner" ] || kill -TERM "$runner" 2>/dev/null' TERM INT
"$capstan" sweep run "$sweep" --trial "$trial" --slots 1 --launcher srun &
runner=$!
[ "$asked" = no ] || kill -USR1 "$runner" 2>/dev/null

# A signal ends `wait` early, and then the code is not the runner's; 127: it was reported before.
while :; do
  asked=no
  wait "$runner"
  ended=$?
  [ "$ended" -eq 127 ] && break
  code=$ended
  [ "$asked" = no ] && break
done

# 75: saved; 138: signaled before it could listen, and nothing was begun.
[ "$code" -ne 138 ] || code=75
if [ "$code" -eq 75 ] && [ "$requeue" = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 7 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"

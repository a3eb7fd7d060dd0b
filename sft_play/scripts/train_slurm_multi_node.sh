#!/usr/bin/env bash
# One node of a SLURM job: finds machine 0 and becomes the launcher of this node. configs/slurm/train.sbatch starts it with srun.
set -euo pipefail

if [[ -z "${SLURM_STEP_ID:-}" ]]; then # sbatch alone would start it on the first node only
  echo "error: srun has to start this script, on each node of a SLURM job; submit such a job with" \
    "\`make train-slurm NODES=2 NGPU=4\` or \`sbatch configs/slurm/train.sbatch\`" >&2
  exit 2
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address at which SLURM itself reaches that node: its name, unless the cluster is configured otherwise.
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
port=$((15000 + SLURM_JOB_ID % 15000)) # a different one for each job, below the range of ephemeral ports

# exec: srun's signals go to the launcher, which forwards them to its ranks
exec "${PYTHON:-.venv/bin/python}" -m sft_play train --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
  --master-addr "${address:-$first}" --master-port "$port" "$@"

#!/usr/bin/env bash
# One node of a SLURM job: finds machine 0 and becomes the launcher of this node. configs/slurm/train.sbatch starts it with srun.
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address under which SLURM itself reaches that node; it is the name, unless the cluster says otherwise.
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
port=$((15000 + SLURM_JOB_ID % 15000)) # each job its own, below the ports that systems hand out by themselves

# exec: srun's signals go to the launcher, which passes them on to its ranks
exec "${PYTHON:-.venv/bin/python}" -m sft_play train --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
  --master-addr "${address:-$first}" --master-port "$port" "$@"

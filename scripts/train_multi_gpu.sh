#!/usr/bin/env bash
# Trains on several GPUs of this machine: the same as `make train-distributed`.
#   scripts/train_multi_gpu.sh [number of GPUs (default: all)] [section.key=value ...]
#   CONFIG=configs/run_lora.yaml scripts/train_multi_gpu.sh 2 train.learning_rate=1e-4
set -euo pipefail
cd "$(dirname "$0")/.."

processes=0
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  processes=$1
  shift
fi
exec "${PYTHON:-.venv/bin/python}" -m sft_play train --config "${CONFIG:-configs/run_distributed.yaml}" --processes "$processes" "$@"

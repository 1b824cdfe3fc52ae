#!/usr/bin/env bash
# Train, with torchtitan's interface:
#
#   ./run_train.sh                                        the debug model, on what is here
#   CONFIG_FILE=train_configs/X.toml ./run_train.sh --training.steps=100
#
#   NGPU         processes; default: all GPUs, or 2 on a machine without one
#   LOG_RANK     ranks whose output is shown; default 0
#   CONFIG_FILE  default train_configs/debug_model.toml
#   TRAIN_FILE   module that trains; default recipes.train
set -euo pipefail

cd "$(dirname "$0")"
if [ -z "${NGPU:-}" ]; then
  NGPU=$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
LOG_RANK=${LOG_RANK:-0}
CONFIG_FILE=${CONFIG_FILE:-train_configs/debug_model.toml}
TRAIN_FILE=${TRAIN_FILE:-recipes.train}

# Without this each process takes every core.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  OMP_NUM_THREADS=$(( $(getconf _NPROCESSORS_ONLN) / NGPU ))
  if [ "$OMP_NUM_THREADS" -lt 1 ]; then OMP_NUM_THREADS=1; fi
fi
export OMP_NUM_THREADS
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

exec python3 -m torch.distributed.run --nproc_per_node="$NGPU" --rdzv_backend=c10d \
  --rdzv_endpoint="${RDZV_ENDPOINT:-localhost:0}" \
  --local-ranks-filter="$LOG_RANK" --role=rank --tee=3 \
  -m "$TRAIN_FILE" --job.config_file="$CONFIG_FILE" "$@"

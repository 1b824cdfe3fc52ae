#!/usr/bin/env bash
# Train, with torchtitan's interface:
#
#   ./run_train.sh                                        the debug model, on what is here
#   CONFIG_FILE=train_configs/X.toml ./run_train.sh --training.steps=100
#
#   NGPU         processes; default: all GPUs, or 2 on a machine without one
#   LOG_RANK     local ranks whose output is shown; default 0
#   CONFIG_FILE  default train_configs/debug_model.toml
#   TRAIN_FILE   module that trains; default recipes.train
#
# On more than one node, start it on each of them, with the same arguments:
#
#   NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=node0:29500 ./run_train.sh        on node0
#   NNODES=2 NODE_RANK=1 RDZV_ENDPOINT=node0:29500 ./run_train.sh        on the other
#
#   NNODES         nodes; default 1
#   NODE_RANK      which one this is, 0 to NNODES - 1; ranks are numbered in this order
#   RDZV_ENDPOINT  host:port at which node 0 listens and the others find it
#   RDZV_ID        name of the run, the same on all nodes; default mtraining
#   JOIN_TIMEOUT   seconds that a node waits for the others; default 600
#
# Ranks of different nodes connect through the interface to which the node's own name
# leads. Where that is the wrong one, or a loopback, export NCCL_SOCKET_IFNAME and
# GLOO_SOCKET_IFNAME with the name of the right one: the ranks inherit them.
#
# If a node ends, so do the others, and the last line of each says why: at once if the
# process was killed, after --comm.train_timeout_seconds if it cannot be reached. With
# --checkpoint.enable, the same commands go on from the last checkpoint; its folder must
# be one that all nodes share. Ctrl-C and SIGTERM end this node's ranks, and so the run.
set -euo pipefail

cd "$(dirname "$0")"

refuse() {
  echo "run_train.sh: $*" >&2
  exit 2
}

NNODES=${NNODES:-1}
JOIN_TIMEOUT=${JOIN_TIMEOUT:-600}
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || refuse "NNODES ('$NNODES') must be a number, at least 1"
[[ $JOIN_TIMEOUT =~ ^[1-9][0-9]*$ ]] ||
  refuse "JOIN_TIMEOUT ('$JOIN_TIMEOUT') must be a number of seconds, at least 1"
if [ "$NNODES" -gt 1 ]; then
  [ -n "${NODE_RANK:-}" ] || refuse "NNODES ($NNODES) needs NODE_RANK, 0 to $((NNODES - 1))"
  [ -n "${RDZV_ENDPOINT:-}" ] ||
    refuse "NNODES ($NNODES) needs RDZV_ENDPOINT, host:port of node 0"
  [[ $RDZV_ENDPOINT =~ ^.+:[1-9][0-9]{0,4}$ && ${RDZV_ENDPOINT##*:} -le 65535 ]] ||
    refuse "RDZV_ENDPOINT ('$RDZV_ENDPOINT') must be host:port of node 0"
fi
NODE_RANK=${NODE_RANK:-0}
[[ $NODE_RANK =~ ^(0|[1-9][0-9]*)$ ]] && [ "$NODE_RANK" -lt "$NNODES" ] ||
  refuse "NODE_RANK ('$NODE_RANK') must be 0 to $((NNODES - 1)) with NNODES ($NNODES)"

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

# torchrun's c10d rendezvous numbers nodes by the names of their hosts, its static one by
# NODE_RANK: neighbours in the ring of nodes are those that stand side by side in it.
if [ "$NNODES" -eq 1 ]; then
  meet=(--rdzv_backend=c10d --rdzv_endpoint="${RDZV_ENDPOINT:-localhost:0}")
else
  meet=(--rdzv_backend=static --rdzv_endpoint="$RDZV_ENDPOINT" --nnodes="$NNODES"
    --node_rank="$NODE_RANK" --rdzv_id="${RDZV_ID:-mtraining}"
    --rdzv_conf="timeout=$JOIN_TIMEOUT")
fi

# exec: signals reach torchrun, which ends its processes.
exec python3 -m recipes.launch --nproc_per_node="$NGPU" "${meet[@]}" \
  --local-ranks-filter="$LOG_RANK" --role=rank --tee=3 \
  -m "$TRAIN_FILE" --job.config_file="$CONFIG_FILE" "$@"

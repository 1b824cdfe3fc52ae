#!/usr/bin/env bash
# Train on the nodes of a SLURM job: one launcher (run_train.sh) per node. Submit it from
# the repository; options of sbatch come before the script, those of the training after:
#
#   CONFIG_FILE=train_configs/X.toml sbatch --nodes=4 recipes/slurm_train.sh \
#       --checkpoint.enable --ring.rotation=two_level
#
# Everything that run_train.sh takes from the environment may be set, but for NNODES,
# NODE_RANK, RDZV_ENDPOINT and RDZV_ID, which come from SLURM. And besides:
#
#   RDZV_PORT  at which node 0 listens; default 15000 to 29999, by the number of the job
#   RESTARTS   how often the job goes back into the queue after a failure, or when its
#              time is nearly up; default 0. It then goes on from its last checkpoint:
#              without --checkpoint.enable it would begin anew
#
# SLURM itself puts the job back when it is preempted or loses a node (--requeue). The
# dump folder must be one that all nodes share. scancel ends all ranks.
#SBATCH --job-name=mtraining
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:USR1@120
set -euo pipefail

refuse() {
  echo "slurm_train.sh: $*" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "no SLURM_JOB_ID: start with sbatch"
# sbatch runs a copy of this script from a folder of its own.
cd "$SLURM_SUBMIT_DIR"
[ -x run_train.sh ] || refuse "no run_train.sh in $PWD: submit from the repository"
RESTARTS=${RESTARTS:-0}
[[ $RESTARTS =~ ^(0|[1-9][0-9]*)$ ]] ||
  refuse "RESTARTS ('$RESTARTS') must be a number, at least 0"

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES=$SLURM_JOB_NUM_NODES
export RDZV_ENDPOINT=${hosts%%$'\n'*}:${RDZV_PORT:-$((15000 + SLURM_JOB_ID % 15000))}
export RDZV_ID=$SLURM_JOB_ID
# srun does not take it from the job by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# Back into the queue, if that has not happened too often. SLURM then ends this run.
again() {
  local before=${SLURM_RESTART_COUNT:-0}
  if [ "$before" -ge "$RESTARTS" ]; then
    echo "slurm_train.sh: $1; $before of RESTARTS ($RESTARTS) restarts are used" >&2
    return 0 # alone, in a trap, it would return what the signal has interrupted
  fi
  echo "slurm_train.sh: $1; restart $((before + 1)) of $RESTARTS" >&2
  requeued=1
  scontrol requeue "$SLURM_JOB_ID"
}

requeued='' signalled=''
trap 'signalled=1; again "the time limit is near"' USR1

# NODE_RANK is another on each node, and must be read there. A node that is left notices
# by itself, and its last line says so: srun need not kill it.
# shellcheck disable=SC2016
srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --label \
  bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run_train.sh "$@" &
step=$!
while
  signalled='' code=0
  wait "$step" || code=$?
  [ -n "$signalled" ] # the signal has ended the wait, not srun
do :; done

# Not again: what was refused before it began (2), and what someone has ended (SIGINT,
# SIGTERM).
case $code in
  0 | 2 | 130 | 143) ;;
  *) [ -n "$requeued" ] || again "the training ended with code $code" ;;
esac
exit "$code"

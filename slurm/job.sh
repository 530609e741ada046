#!/bin/bash
# One job of any app:  sbatch slurm/job.sh apps.cosmoflow apps/cosmoflow/configs/batch512.yaml [key=value ...]
# Accounts, partitions and node counts go on the sbatch line or into slurm/sites/<cluster>; settings of a run never do.
#SBATCH --job-name=hpcai
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

set -u
app=$1; shift
# Ranks know one another by this (hpcai/dist/watch.py); srun hands it on.
export HPCAI_TOKEN=${HPCAI_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
# Ranks leave with 85 one after the other: Slurm must not take the first for a failure and kill the rest. A rank that does fail ends
# the others itself (hpcai/dist/watch.py).
srun --kill-on-bad-exit=0 ${HPCAI_SRUN:-} python -m "$app" "$@"
code=$?
# 85: the run was asked to stop, has saved itself and wants to be started again. Here, outside of any container, scontrol exists.
if [ "$code" = 85 ]; then
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"

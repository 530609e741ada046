#!/bin/bash
# One Slurm job of any app. `hpcai job` writes it with a site's lines and the settings of a run in it; by hand, with the #SBATCH lines of the site
# as words of sbatch:
#   HPCAI_SITE=slurm/sites/NAME.sh sbatch -N2 slurm/job.sh apps.cosmoflow apps/cosmoflow/configs/batch512.yaml [key=value ...]
# Accounts, partitions and node counts belong to sbatch, what a machine needs to slurm/sites. Settings of a run never stand here.
#SBATCH --job-name=hpcai
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

srun=() container=()
# hpcai job: the lines of the site stand here
# shellcheck source=/dev/null
if [ -n "${HPCAI_SITE:-}" ]; then . "$HPCAI_SITE"; fi
set -u
python=${HPCAI_PYTHON:-python}
# Since Slurm 22.05 a step does not take this from its job.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# Ranks know one another by this (hpcai/dist/watchdog.py); srun hands it on.
export HPCAI_TOKEN=${HPCAI_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
# Apptainer shows a container the folder that it starts in, and what the site lets it; here are the other folders of the run.
if [ -n "${HPCAI_FOLDERS:-}" ]; then export APPTAINER_BIND=$HPCAI_FOLDERS${APPTAINER_BIND:+,$APPTAINER_BIND}; fi
app=$1; shift
run=("$python" -m "$app")
# An archive of a Python environment is read once, sent to the nodes, and unpacked to a new folder on each; then its Python is the job's.
remove() { :; }
if [ -n "${HPCAI_ENVIRONMENT:-}" ]; then
  # shellcheck disable=SC2206
  each=(srun --kill-on-bad-exit=1 "${srun[@]}" ${HPCAI_SRUN:-} --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
  "${each[@]}" mkdir -m 700 "$HPCAI_AT" || exit
  remove() { "${each[@]}" rm -rf "$HPCAI_AT"; }
  trap remove EXIT
  sbcast "$HPCAI_ENVIRONMENT" "$HPCAI_AT/packed.tar" || exit
  # shellcheck disable=SC2016
  unpack='cd "$0" && tar -xf packed.tar && rm packed.tar && { [ ! -x bin/conda-unpack ] || bin/conda-unpack; }'
  "${each[@]}" sh -c "$unpack" "$HPCAI_AT" || exit
  python=$HPCAI_AT/bin/python
  run=("$python" -m hpcai.cli run "${app#apps.}")
  unset PYTHONPATH PYTHONHOME
  export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
fi
if [ -n "${HPCAI_STAGE:-}" ]; then
  if [ -n "${HPCAI_IMAGE:-}" ]; then
    srun mkdir -p "$HPCAI_STAGE" || exit
    export APPTAINER_BIND=$HPCAI_STAGE${APPTAINER_BIND:+,$APPTAINER_BIND}
  fi
  # shellcheck disable=SC2086
  srun "${srun[@]}" ${HPCAI_SRUN:-} "${container[@]}" "$python" -m hpcai.cli data stage "$HPCAI_DATA" "$HPCAI_STAGE" || exit
  set -- "$@" "data.directory=$HPCAI_STAGE"
fi
# Ranks leave with 85 one after the other: Slurm must not take the first for a failure and kill the rest. A rank that does fail ends
# the others itself (hpcai/dist/watchdog.py).
# shellcheck disable=SC2086
srun --kill-on-bad-exit=0 "${srun[@]}" ${HPCAI_SRUN:-} "${container[@]}" "${run[@]}" "$@"
code=$?
# 85: the run was asked to stop, has saved itself and wants to be started again. Here, outside of any container, scontrol exists.
if [ "$code" = 85 ] && [ "${HPCAI_REQUEUE:-1}" = 1 ]; then
  remove
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
if [ "$code" = 0 ] && [ -n "${HPCAI_RUN:-}" ]; then
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 "${srun[@]}" "${container[@]}" "$python" -m hpcai.cli report "$HPCAI_RUN" \
    || echo "the run has finished; its page was not drawn: hpcai report $HPCAI_RUN" >&2
fi
exit "$code"

# Any cluster with Slurm, and the one machine of docs/cluster.md: one process on each node, no modules, the scheduler's own binding.
# With GPUs: --per-node 4 --option=--gpus-per-node=4. A file of your own, made from this one, is taken as --site FILE.
#: local /tmp /var/tmp /dev/shm
#SBATCH --ntasks-per-node=1

if [ -n "${HPCAI_IMAGE:-}" ]; then
  container=(apptainer exec "$HPCAI_IMAGE")
  if [ -e /dev/nvidiactl ]; then container=(apptainer exec --nv "$HPCAI_IMAGE"); fi
fi

# NERSC Perlmutter, GPU nodes: one AMD EPYC 7763 (64 cores, 128 threads), 4 NVIDIA A100.
# https://github.com/NERSC/nersc-dl-multigpu (as of 2024-04-10), https://docs.nersc.gov/jobs/policy/ and /beginner-guide/nodetypesfig
# (read in November 2026), /jobs/power-capping (likewise). Not run there by us. Without --queue jobs get the debug QOS.
#: account required
#: queue --qos
#: power --gpu-power
#: local /tmp /dev/shm
#: container name
#SBATCH --constraint=gpu
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32

# Images are Shifter's, by name; its module of NCCL is that of the first page.
if [ -n "${HPCAI_IMAGE:-}" ]; then
  container=(shifter "--image=$HPCAI_IMAGE" --module=gpu,nccl-plugin)
fi

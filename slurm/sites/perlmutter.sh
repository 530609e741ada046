# NERSC Perlmutter, GPU nodes: one AMD EPYC 7763 (64 cores, 128 threads), 4 NVIDIA A100.
# Not run there by us. Without --queue jobs get the debug QOS. 256 of the 1,794 nodes have GPUs of 80 GB.
#: page https://github.com/NERSC/sc25-dl-tutorial 2025-11-16
#: page https://docs.nersc.gov/jobs/policy/ 2026-11-29
#: page https://docs.nersc.gov/beginner-guide/nodetypesfig 2026-11-29
#: page https://docs.nersc.gov/jobs/power-capping 2026-11-29
#: gpu a100-40
#: account required
#: queue --qos
#: power --gpu-power
#: local /tmp /dev/shm
#: container name
#SBATCH --constraint=gpu
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32

# Slurm gives task 0 the cores next to GPU 3, task 3 those next to GPU 0.
export CUDA_VISIBLE_DEVICES=3,2,1,0 FI_MR_CACHE_MONITOR=userfaultfd
# Images are Shifter's, by name; its module nccl-plugin brings the plugin of NCCL.
if [ -n "${HPCAI_IMAGE:-}" ]; then
  container=(shifter "--image=$HPCAI_IMAGE" --module=gpu,nccl-plugin)
fi

# OLCF Frontier: one AMD EPYC of 64 cores, of which jobs have 56, and 4 AMD MI250X, which are 8 GPUs.
# Not run there by us.
#: page https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html 2026-07-22
#: page https://docs.olcf.ornl.gov/systems/frontier_user_guide.html 2026-07-22
#: page https://docs.olcf.ornl.gov/software/containers_on_frontier.html 2026-07-22
#: account required
#: local /tmp /dev/shm /mnt/bb
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --network=disable_rdzv_get

module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a || exit
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH
srun=(--gpus-per-task=1 --gpu-bind=closest)
HPCAI_ADDRESS=$(hostname -i); export HPCAI_ADDRESS
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
MIOPEN_USER_DB_PATH=$(mktemp -u /tmp/miopen-XXXXXXXXXX); export MIOPEN_USER_DB_PATH
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
if [ -n "${HPCAI_IMAGE:-}" ]; then
  module load olcf-container-tools apptainer-enable-mpi apptainer-enable-gpu || exit
  container=(apptainer exec "$HPCAI_IMAGE")
fi

# JSC JUWELS Booster: 48 cores of AMD EPYC, 4 NVIDIA A100, InfiniBand.
# Not run there by us. Cores, partition, GPUs and network are those of batch scripts that users have published; the hint is JURECA's. The
# node daemon is ParaStation's, not slurmd. Before: jutil env activate -p PROJECT, which sets $PROJECT and $SCRATCH.
#: page https://apps.fz-juelich.de/jsc/hps/juwels/batchsystem.html 2026-11-29
#: page https://apps.fz-juelich.de/jsc/hps/jureca/affinity.html 2026-11-29
#: gpu a100-40
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=booster
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --hint=nomultithread

# A node's name on InfiniBand ends in i; the other name does not reach every cell.
HPCAI_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)i; export HPCAI_ADDRESS
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

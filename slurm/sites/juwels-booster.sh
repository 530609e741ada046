# JSC JUWELS Booster: 48 cores of AMD EPYC, 4 NVIDIA A100, InfiniBand.
# https://apps.fz-juelich.de/jsc/hps/juwels/batchsystem.html, /jsc/hps/jureca/affinity.html for the hint; cores, partition, GPUs and network
# as batch scripts that users have published have them (read in November 2026). Not run there by us. The node daemon is ParaStation's, not
# slurmd. Before: jutil env activate -p PROJECT, which sets $PROJECT and $SCRATCH.
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

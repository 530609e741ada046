# CINECA Leonardo, Booster: one Intel Xeon of 32 cores, 4 NVIDIA A100 of 64 GB, HDR InfiniBand.
# https://docs.hpc.cineca.it/hpc/leonardo.html (read in November 2026). Not run there by us. $SCRATCH and $WORK are shared.
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=boost_usr_prod
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8

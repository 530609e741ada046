# CINECA Leonardo, Booster: one Intel Xeon of 32 cores, 4 NVIDIA A100 of 64 GB, HDR InfiniBand.
# https://docs.hpc.cineca.it/hpc/leonardo.html; partition and GPUs as batch scripts that users have published have them (read in November
# 2026). Not run there by us.
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=boost_usr_prod
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8

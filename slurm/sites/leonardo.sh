# CINECA Leonardo, Booster: one Intel Xeon of 32 cores, 4 NVIDIA A100 of 64 GB, HDR InfiniBand.
# Not run there by us. Partition and GPUs are those of batch scripts that users have published. hpcai plan has no data sheet of this A100.
#: page https://docs.hpc.cineca.it/hpc/leonardo.html 2026-11-29
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=boost_usr_prod
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8

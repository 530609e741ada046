# JSC JUPITER Booster: 4 NVIDIA GH200 (72 cores and one GPU each), 4 NDR200 InfiniBand ports.
# https://apps.fz-juelich.de/jsc/hps/jupiter/configuration.html and batchsystem.html; partition and GPUs as batch scripts that users have
# published have them (read in November 2026). Not run there by us. The node daemon is ParaStation's, not slurmd. Before: jutil env activate
# -p PROJECT, which sets $PROJECT and $SCRATCH.
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=booster
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72

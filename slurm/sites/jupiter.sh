# JSC JUPITER Booster: 4 NVIDIA GH200 (72 cores and one GPU each), 4 NDR200 InfiniBand ports.
# Not run there by us. Partition and GPUs are those of batch scripts that users have published. The node daemon is ParaStation's, not
# slurmd. Before: jutil env activate -p PROJECT, which sets $PROJECT and $SCRATCH.
#: page https://apps.fz-juelich.de/jsc/hps/jupiter/configuration.html 2026-11-29
#: page https://apps.fz-juelich.de/jsc/hps/jupiter/batchsystem.html 2026-11-29
#: gpu gh200
#: account required
#: local /tmp /dev/shm
#: container none
#SBATCH --partition=booster
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72

# CSCS Alps, Clariden and Daint: 4 NVIDIA GH200 (72 cores and one GPU each), 4 Slingshot ports.
# Not run there by us. --container takes an environment definition file (EDF) with the hook com.hooks.aws_ofi_nccl (docs/containers.md).
#: page https://docs.cscs.ch/running/slurm 2026-08-20
#: page https://docs.cscs.ch/clusters/clariden 2026-08-20
#: page https://docs.cscs.ch/software/communication/nccl 2026-08-20
#: page https://docs.cscs.ch/software/container-engine/resource-hook 2026-08-20
#: page https://docs.cscs.ch/software/ml/pytorch 2026-08-20
#: gpu gh200
#: account required
#: local /tmp /dev/shm
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72

ulimit -c 0
export NCCL_NET="AWS Libfabric" NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_PROTO=^LL128
export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=16384 FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software FI_MR_CACHE_MONITOR=userfaultfd
export MPICH_GPU_SUPPORT_ENABLED=0 CUDA_CACHE_DISABLE=1
if [ -n "${HPCAI_IMAGE:-}" ]; then
  srun=("--environment=$HPCAI_IMAGE")
fi

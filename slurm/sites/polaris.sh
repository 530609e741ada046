# ALCF Polaris (PBS): one AMD EPYC 7543P (32 cores, 64 threads), 4 NVIDIA A100, Slingshot 11.
# Not run there by us.
#: page https://docs.alcf.anl.gov/polaris/ 2026-08-19
#: page https://docs.alcf.anl.gov/polaris/running-jobs/ 2026-08-19
#: page https://docs.alcf.anl.gov/polaris/data-science/frameworks/pytorch/ 2026-08-19
#: page https://docs.alcf.anl.gov/polaris/applications-and-libraries/libraries/nccl/ 2026-08-19
#: page https://docs.alcf.anl.gov/polaris/containers/containers/ 2026-08-19
#: gpu a100-40
#: cpus 64
#: account required
#: queue required
#: time required
#: select system=polaris
#: local /tmp /dev/shm /local/scratch
#PBS -l place=scatter
#PBS -l filesystems=home:eagle

per_node=4
# GPU 0 is next to the last NUMA node, GPU 3 to the first.
mpiexec=(--cpu-bind list:24-31,56-63:16-23,48-55:8-15,40-47:0-7,32-39)
export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET="AWS Libfabric"
export HPCAI_NCCL_PLUGIN=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
export LD_LIBRARY_PATH=$HPCAI_NCCL_PLUGIN:/soft/libraries/hwloc/lib/:${LD_LIBRARY_PATH:-}
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
if [ -n "${HPCAI_IMAGE:-}" ]; then
  module use /soft/modulefiles
  module load spack-pe-base apptainer cray-mpich-abi || exit
  export APPTAINERENV_LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH:/opt/cray/pe/pals/1.2.12/lib
  container=(apptainer exec --nv --fakeroot -B /opt -B /soft/libraries -B /var/run/palsd/ "$HPCAI_IMAGE")
fi

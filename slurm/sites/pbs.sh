# Any cluster with PBS Professional or OpenPBS and an mpiexec that takes --ppn: one process on each node, no modules.
# A file of your own, made from this one, is taken as --site FILE.
#: time required
#: local /tmp /var/tmp /dev/shm
#PBS -l place=scatter

if [ -n "${HPCAI_IMAGE:-}" ]; then
  container=(apptainer exec "$HPCAI_IMAGE")
  if [ -e /dev/nvidiactl ]; then container=(apptainer exec --nv "$HPCAI_IMAGE"); fi
fi

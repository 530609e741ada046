"""The processes of a job and their mesh of named axes."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".environment": ["RankInfo", "read_rank_info"],
        ".launch": ["start", "single_process", "mpi_communicator"],
        ".mesh": ["Mesh", "Axis"],
        ".collectives": ["all_reduce_", "broadcast_object", "gather_rows_to_first"],
    },
)

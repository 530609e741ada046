"""Staging: the files of a data set, copied from the shared file system to each node's own disk.

The nodes read each byte of the shared file system once, past the page cache, and broadcast it to one another.

    shard    a part of the data files; with S shards the nodes form S groups of neighbours, and each group holds one shard
    lane     the j-th process of every node of a group, with every so many-th file that a node of the group misses. The processes
             of a lane read the blocks of its files in turns and broadcast them; each writes what its node misses
    beat     eight blocks of every lane; then all processes sum their failures, so that all of them stop at the same beat

    TARGET/<name>               a whole file: written under another name, compared, flushed to the disk, given the time of its
                                source and renamed. A later run keeps files of the source's size and time
    TARGET/.stage.json          the source, whether SHA-256 were compared, and the files that were whole at the end

A process holds six blocks in memory, and the buffers of its reader.
"""

from hpcai.data.stage.job import Staged, stage_in
from hpcai.data.stage.plan import assign_shards, staged_paths

__all__ = ["Staged", "assign_shards", "stage_in", "staged_paths"]

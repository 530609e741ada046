"""Staging: copy the files of a dataset from the shared file system to the disk of each node.

Each byte of the shared file system is read once, by direct reads, and broadcast among the nodes.

    shard    a part of the data files. With S shards the nodes form S contiguous groups, and each group holds one shard
    ring     the j-th rank of every node of a group, and a part of the files that are missing on a node of the group. The ranks of a
             ring read the blocks of these files in turn and broadcast them; each writes those missing on its node
    interval eight blocks of every ring. Then all ranks sum their failures, so that all stop at the same block

    TARGET/<name>               a complete file: written under another name, verified, flushed to the disk, given the time of its
                                source and renamed. A later run keeps files of the size and time of the source
    TARGET/.stage.json          the source, whether SHA-256 were compared, and the files that were complete at the end

A rank has six blocks in memory, and the buffers of its reader.
"""

from hpcai.data.stage.job import Staged, stage_in
from hpcai.data.stage.plan import assign_shards, staged_paths

__all__ = ["Staged", "assign_shards", "stage_in", "staged_paths"]

"""Staging: what a node needs of a data set, copied from the shared file system to the node's own disk.

Of all nodes that want the same files each reads a part from the shared file system, past the page cache, and the parts go
around over the network, so that each byte leaves the shared file system once, however many nodes there are.

    shard    a part of the data files; with S shards the nodes form S groups of neighbours, and each group holds one shard
    lane     the j-th process of every node of a group; a file goes through one lane, so on a node one process writes it, in
             order, and its SHA-256 is taken on the way. One large file alone keeps one process of each node busy
    circle   those processes of a lane whose nodes miss a file: they read its blocks in turns and broadcast them
    beat     eight blocks of every lane. All processes of the job tell one another at each beat whether they fare well, and stop
             at the same one, so that nobody is left waiting in a broadcast

    TARGET/<name>               a whole file: written beside its place, compared, flushed to the disk and renamed
    TARGET/.stage.json          the source, and every whole file with its size and SHA-256
    TARGET/.stage.<n>.jsonl     while copies are made, or after a run was killed: files that became whole since

A process holds eight blocks in memory, and what its reader needs.

F files   N nodes
"""

from hpcai.data.stage.job import Staged, stage_in
from hpcai.data.stage.plan import assign, holds, on_this_node, shard_of

__all__ = ["Staged", "assign", "holds", "on_this_node", "shard_of", "stage_in"]

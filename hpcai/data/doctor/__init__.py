"""A data set looked over before the job is queued: files against their manifest, values, duplicates, ranks, and the disk.

    DIR/<split>/*.h5 | *.npy        rows along dim 0 of every dataset; a .npy file is one sample
    DIR/<split>/index.json          {"files": [{"name", "rows", "bytes", "sha256"}], "fields": {NAME: {"dtype", "shape", "low",
                                    "high", "blank"}}, ...}; all keys but "files" and "name" may be absent; null in a
                                    shape allows any length
    DIR/<split>/.records/NAME.json  what the maker of a file noted of it, where it did; trusted where the index says nothing

Each file is read once, in blocks, past the page cache: its SHA-256 and the checks of its rows see the same bytes. No file is
believed. The HDF5 library, which a damaged file can crash or hang, runs in child processes that may die; what they say of offsets
and shapes is compared with the size of the file before anything is allocated.

R rows of a file   V values of a row
"""

from hpcai.data.doctor.examination import check
from hpcai.data.doctor.findings import Division, Finding, Options, Outcome, Progress, Summary, divide
from hpcai.data.doctor.inspector import Inspector, Inspectors
from hpcai.data.doctor.rewriting import repair

__all__ = [
    "Division",
    "Finding",
    "Inspector",
    "Inspectors",
    "Options",
    "Outcome",
    "Progress",
    "Summary",
    "check",
    "divide",
    "repair",
]

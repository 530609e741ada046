"""``hpcai data check DIR``: validate a data set before the job is queued.

    DIR/<split>/*.h5 | *.npy        rows along dim 0 of every dataset; a .npy file is one sample
    DIR/<split>/index.json          the expected files: see hpcai.data.index

Files are untrusted: the HDF5 library, which a damaged file can crash or hang, runs in child processes (``pool``). ``command`` is
the program, ``examination`` the check itself, ``inspection`` the code that reads one file in a child process, ``findings`` the
kinds of findings, and ``indexing`` implements ``--index``.
"""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".command": ["main"],
        ".findings": ["Finding", "Options", "Outcome"],
        ".examination": ["check_dataset"],
        ".indexing": ["write_indexes"],
    },
)

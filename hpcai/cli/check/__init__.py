"""``hpcai data check DIR``: a data set looked over before the job is queued.

    DIR/<split>/*.h5 | *.npy        rows along dim 0 of every dataset; a .npy file is one sample
    DIR/<split>/index.json          what the files should be: see hpcai.data.index

No file is believed: the HDF5 library, which a damaged file can crash or hang, runs in child processes (``pool``) that may die.
``command`` is the program, ``examination`` the check itself, ``inspection`` what a child does with one file, ``findings`` all that
can be found, and ``indexing`` what ``--index`` writes.
"""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        ".command": ["main"],
        ".findings": ["Finding", "Options", "Outcome"],
        ".examination": ["check_dataset"],
        ".indexing": ["write_indexes"],
    },
)

"""``hpcai data check DIR``: a data set looked over before the job is queued.

    DIR/<split>/*.h5 | *.npy        rows along dim 0 of every dataset; a .npy file is one sample
    DIR/<split>/index.json          what the files should be: see hpcai.data.index
    DIR/<split>/.records/NAME.json  what the maker of a file noted of it, where it did; trusted where the index says nothing

Each file is read once, in blocks, past the page cache: its SHA-256 and the checks of its rows see the same bytes. No file is
believed. The HDF5 library, which a damaged file can crash or hang, runs in child processes that may die; what they say of offsets
and shapes is compared with the size of the file before anything is allocated. ``command`` holds what the shell calls,
``examination`` the check itself, ``findings`` all that it can find, and ``remedies`` what ``--repair`` and ``--index`` write.

R rows of a file   V values of a row
"""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        ".command": ["main"],
        ".findings": ["Finding", "Options", "Outcome"],
        ".examination": ["examine"],
        ".remedies": ["repair", "tabulate"],
    },
)

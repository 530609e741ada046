"""The apps, one folder each. `hpcai run NAME` finds them, and apps of the user in other folders of this namespace.

The commands of an app run on one rank, or on many behind mpiexec, srun or torchrun.
"""

from pkgutil import extend_path

from hpcai.stop import interrupt_imports

__path__ = extend_path(__path__, __name__)
interrupt_imports(__name__)

"""Converters and simulators of the data sets of the apps. Most need no torch."""

from pkgutil import extend_path

from hpcai.stop import interrupt_imports

__path__ = extend_path(__path__, __name__)
interrupt_imports(__name__)

"""Makers of the files that the apps read, from a raw public format or from a simulator. They need no torch."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

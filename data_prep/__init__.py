"""Builders of the data sets of the apps, from a public format or from a simulator. Most need no torch."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

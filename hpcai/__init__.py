"""hpcai: scientific AI training for supercomputers. Importing it costs nothing: every part is imported on use."""

__version__ = "0.1.0"

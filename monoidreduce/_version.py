"""The version, in one place: packaging and the command line both read it here."""

__version__ = "0.2.0"

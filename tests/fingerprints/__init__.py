"""Fingerprints: proof that a change of names or structure changed nothing that runs.

``record`` writes what the library compiles and launches to files of text, with all names taken out; ``compare`` does it
again and shows what differs. See ``__main__.py`` for the command line.
"""

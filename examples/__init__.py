"""Short scripts that show the library at work; each is run by ``python -m examples.NAME`` and draws what it found."""

"""Doors to other libraries, each named after what it imports; nothing here is imported by default."""

"""Doors to other libraries, one file each, importing what they are named after; nothing here is imported by default."""

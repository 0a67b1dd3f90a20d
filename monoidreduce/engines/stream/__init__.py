"""Folds over columns that arrive in chunks."""

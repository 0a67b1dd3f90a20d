"""Calls on a GPU that are nothing but launches: kept as such, forward and backward."""

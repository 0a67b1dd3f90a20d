"""Problems in parts: over the ranks of a group, or in chunks that come one after the other."""

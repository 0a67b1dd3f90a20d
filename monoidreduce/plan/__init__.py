"""From program, sizes and device to a schedule. Knows no device code."""

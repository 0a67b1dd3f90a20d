"""What is measured, and the peers it is measured against. Not installed with the library."""

"""What is launched: generated fold kernels, and the small fixed ones beside them."""

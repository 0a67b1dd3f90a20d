"""The text of kernels: from expressions and reductions to lines of Triton."""

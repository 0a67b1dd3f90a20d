"""Engines run folds forward; gradients are folds too, so an engine has no backward of its own."""

"""Trials and the tuner: measure candidate plans on the user's own tensors and keep the fastest correct one."""

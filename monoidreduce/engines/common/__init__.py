"""What several engines share: evaluation in torch, matrix products, combination of partial results."""

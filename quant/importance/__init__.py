"""What the inputs of a model's linears look like, by which their weights are rounded."""

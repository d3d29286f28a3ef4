"""A stage of several ranks as processes: the actors that follow, and rank 0's view of them."""

"""Plans of whole jobs: how many requests are in flight, and what else people ask of them."""

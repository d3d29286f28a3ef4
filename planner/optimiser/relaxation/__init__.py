"""Lower bounds on every assignment of a problem: a linear programme, and prices with a path."""

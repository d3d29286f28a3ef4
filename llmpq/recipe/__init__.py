"""Texts by which schedulers and shells start the Ray of a cluster file, with its devices."""

"""The exact method by boxes: a search over how slow the slowest stage may be."""

"""The exact method by boxes: search over how slow the slowest stage may be."""

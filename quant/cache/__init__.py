"""Packed decoder layers kept on disk for the next start of a stage; `settings` is without torch."""

"""Shared by all packages: errors and their texts, atomic writes, checks of files, units."""

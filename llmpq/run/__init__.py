"""Running a plan over rows: generating, watching, progress, and planning again."""

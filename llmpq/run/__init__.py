"""Running a plan over rows: its options, the run itself, its results, and planning again."""

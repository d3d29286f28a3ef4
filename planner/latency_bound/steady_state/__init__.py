"""Parts of the steady-state timelines: sizes of groups, turns, decode rounds, passes in a row."""

"""One file for each kind of part; each has `run(findings, place, argument)`."""

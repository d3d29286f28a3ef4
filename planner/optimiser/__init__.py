"""Which layer goes where with how many bits: exact search, integer programme and heuristics.

Pure functions on the arrays of `planner.optimiser.problem`; `planner.optimiser.solve` is their
face.
"""

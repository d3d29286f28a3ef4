"""A predictor in a process of its own beside a run, which learns there from its mistakes."""

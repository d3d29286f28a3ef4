"""Whether a run follows its plan, and whether another plan is worth a switch."""

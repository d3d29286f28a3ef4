"""Orders of devices: which there are, and bounds on how good they can be."""

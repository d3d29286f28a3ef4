"""Speed and quality of plans."""

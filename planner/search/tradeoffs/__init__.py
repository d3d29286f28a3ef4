"""Speed against quality: fronts, bounds on either, and the three qualities."""

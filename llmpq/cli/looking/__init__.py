"""Commands that list and show."""

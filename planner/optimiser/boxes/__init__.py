"""The exact search: boxes of limits on the slowest stage, ways to fill stages below them."""

"""What layer times are fitted to: their terms, coefficients, and a correction near measurements."""

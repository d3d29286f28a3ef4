"""The commands that measure, and that prepare weights and predictors, with their options."""

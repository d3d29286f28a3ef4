"""Predicting how many tokens answers get: kinds of predictors, training and judging them (S³)."""

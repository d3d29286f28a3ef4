"""Stages of devices that are not here: they compute for real and take the modelled time."""

"""Simulation of schedules event by event, with lengths drawn at random."""

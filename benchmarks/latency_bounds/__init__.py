"""Schedules under a bound on latency: what finding them costs, and how fast they are."""

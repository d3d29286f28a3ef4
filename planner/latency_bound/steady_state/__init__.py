"""The steady state of schedules: timelines of RRA and WAA, and the parts that they are made of."""

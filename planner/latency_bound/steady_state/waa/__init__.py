"""The steady state of schedules whose stages are divided between the phases."""

"""The steady state of schedules whose stages have both phases in turns."""

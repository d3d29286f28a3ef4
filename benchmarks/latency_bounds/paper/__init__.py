"""ExeGPT's evaluation in simulation: its models, tasks and rivals, and our schedules beside them."""

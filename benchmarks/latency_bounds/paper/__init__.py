"""ExeGPT's evaluation in simulation: its models, tasks and rivals, our schedules beside them."""

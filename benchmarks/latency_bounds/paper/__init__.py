"""ExeGPT's evaluation in simulation: models, tasks, rivals, and our schedules beside them."""

"""What was measured: times of layers, links and loading, models fitted to them, sensitivities."""

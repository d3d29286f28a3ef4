"""Another schedule for stages that run, whose layers and bitwidths stay where they are."""

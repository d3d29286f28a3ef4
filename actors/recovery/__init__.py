"""Going on after faults: noticing them, restarting stages, and replaying what was in flight."""

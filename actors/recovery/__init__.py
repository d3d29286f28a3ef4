"""Recovery from faults: noticing them, restarting stages, replaying requests in flight."""

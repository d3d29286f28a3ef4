"""Schedules with the most throughput under a bound on the latency of requests (ExeGPT)."""

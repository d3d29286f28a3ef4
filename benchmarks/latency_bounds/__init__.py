"""ExeGPT's experiments (section 7): throughput under bounds on latency, beside other schedulers."""

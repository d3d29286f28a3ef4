"""ExeGPT's evaluation (section 7): throughput under bounds on latency, beside other schedulers;
what its issue calls the benchmark `exegpt`.
"""

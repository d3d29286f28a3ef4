"""Command lines: `llmpq-algo` plans, `llmpq-dist` runs, `llmpq-convert` makes safetensors of `.bin`
files.
"""

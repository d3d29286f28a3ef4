"""Command lines: `llmpq-algo` plans, `llmpq-dist` runs, `llmpq-quantize` calibrates a checkpoint,
`llmpq-indicator` measures sensitivities, `llmpq-eval` perplexity, `llmpq-convert` reads `.bin`.
"""

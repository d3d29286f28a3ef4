"""Speed of what llmpq runs: kernels, loading, pipelines, serving."""

"""The journal of a job: what its runs were and how they went, for who looks at it later."""

"""Facts of plans and runs in words, and their views: terminal, notebook, pages, pictures."""

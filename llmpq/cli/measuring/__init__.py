"""Commands that measure devices and models, and prepare weights."""

"""Answers OpenAI's HTTP requests over an engine that generates tokens."""

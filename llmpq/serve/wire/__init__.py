"""OpenAI's requests, answers and errors, as they stand on the wire."""

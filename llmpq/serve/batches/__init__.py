"""OpenAI's files and batches: work that runs behind online requests and survives the server."""

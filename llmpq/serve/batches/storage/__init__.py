"""The folder of files and batches, which outlives the server."""

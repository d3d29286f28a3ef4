"""The options of the commands that have many, one command a file."""

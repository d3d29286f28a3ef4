"""The results of a job on disk: shards, taking them up again, and the finished file."""

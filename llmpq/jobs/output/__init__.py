"""Results of a job on disk: shards, results of earlier runs, and the finished file."""

"""Jobs: batches whose results are on disk once each, and which can be resumed."""

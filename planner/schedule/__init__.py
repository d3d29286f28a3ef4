"""The order in which micro-batches run, of one batch or of a whole job."""

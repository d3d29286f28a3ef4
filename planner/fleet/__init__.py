"""A cluster divided into pipelines of unequal make-up that share the rows of one job."""

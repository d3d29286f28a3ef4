"""What the ranks of a tensor-parallel stage do together: sums, messages from rank 0, gathering."""

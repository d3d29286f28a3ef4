"""What a plan costs: seconds of layers and hops, and bytes of memory."""

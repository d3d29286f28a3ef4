"""The cost model of a plan: seconds of layers and hops, and bytes of memory."""

"""The shape of a model: how it is found, read from its configuration, and checked."""

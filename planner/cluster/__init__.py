"""The devices that a plan may use: cluster files, accelerators, and links between them."""

"""Plans for large models and large fleets: groups of devices, and what planning for them takes."""

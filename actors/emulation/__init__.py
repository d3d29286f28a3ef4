"""Emulated devices and links: a CPU computes, and results are held until their modelled time."""

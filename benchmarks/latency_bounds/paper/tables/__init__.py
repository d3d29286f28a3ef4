"""The tables and pictures of ExeGPT's evaluation."""

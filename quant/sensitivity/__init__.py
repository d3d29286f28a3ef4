"""Measuring how much a decoder layer loses by quantization, from its inputs and weights."""

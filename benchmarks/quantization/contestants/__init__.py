"""Quantizers: each module rounds the decoder linears of a model by one library, and writes what the
weights have become, dequantized; it runs in the interpreter that has the library."""

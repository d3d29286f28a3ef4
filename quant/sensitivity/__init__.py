"""What quantization costs a decoder layer, by its inputs and weights; `form` is without torch."""

"""Measuring what each layer loses by quantization: indicators, omega files, measured points."""

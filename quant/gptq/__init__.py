"""Calibrated rounding (GPTQ) and checkpoints in the format of GPTQModel."""

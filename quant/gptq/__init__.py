"""Calibrated rounding (GPTQ) and checkpoints in GPTQModel's format; `config` is without torch."""

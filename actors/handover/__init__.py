"""Stages that prefill and stages that decode as one group, with keys and values handed over."""

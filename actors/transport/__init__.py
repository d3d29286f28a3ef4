"""How hidden states go from stage to stage and tokens back, and what the ranks of a stage share."""

from typing import Literal

Transport = Literal["auto", "ray", "gloo"]
"""How tensors go between stages; auto: gloo where it connects, with NCCL for hidden states between
GPUs of one node, else Ray."""

TRANSPORTS: tuple[Transport, ...] = ("auto", "ray", "gloo")

"""Mean squares of the inputs of each linear, by transformers, for libraries that ask for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.quantization.contestants.exchange import Given


@torch.no_grad()
def mean_squares(given: Given) -> dict[str, Tensor]:
    """E[x²], float32 `[in]`, by the name of each decoder linear's weight."""
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    sums: dict[str, Tensor] = {}

    def watch(name: str, linear: nn.Linear) -> None:
        def see(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            own = arguments[0].double().square().sum((0, 1))
            sums[name] = sums[name] + own if name in sums else own

        linear.register_forward_pre_hook(see)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            watch(f"{name}.weight", module)
    token_ids = torch.from_numpy(given.token_ids)
    for sequence in token_ids:
        model.model(sequence[None])
    return {name: (total / token_ids.numel()).float() for name, total in sums.items()}

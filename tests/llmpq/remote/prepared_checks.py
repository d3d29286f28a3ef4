"""What forks of a prepared process are asked for by tests."""

from __future__ import annotations

import sys
from typing import Any

from tests.paths import ROOT


def leave_out_what_only_compilers_need() -> None:
    """Check that nothing is in memory that is left out, also where a stage's model was built, and
    that it is what it is once asked for: the packages, and what transformers has taken of them.
    """
    from actors.stage.model_config import read_config
    from actors.stage.partial_model import empty_model

    assert empty_model(read_config(ROOT / "examples/demo_model")).lm_head.weight.is_meta
    left_out = ("ray", "torch._dynamo", "torch.distributed.tensor")
    assert not [name for name in left_out if name in sys.modules]
    from transformers import masking_utils

    taken: Any = masking_utils.TransformGetItemToIndex  # type: ignore[attr-defined]
    made = taken()  # what it has taken of torch._dynamo
    import scipy.special
    import torch
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    assert type(made) is TransformGetItemToIndex
    assert torch.distributed.tensor.DTensor.__module__ == "torch.distributed.tensor"
    assert scipy.special.ndtr(0) == 0.5
    assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist() == [2, 2]


def generate_as_transformers() -> None:
    """Check that a model of transformers still generates, which asks for masks and caches."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes))
    answers = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2)
    assert answers.shape == (1, 5)


def fail() -> None:
    raise ValueError("as asked")

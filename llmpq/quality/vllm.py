"""A plan in vLLM's terms: the format of its weights, the script that starts it, and what cannot
be.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from planner.plan.spec import PlanSpec, StagePlan
from quant.checkpoint.formats.readers import VLLM, VLLM_KERNELS, is_old, vllm_kernel
from quant.checkpoint.stored_config import COMPRESSED, GPTQ_METHOD
from quant.common.errors import SpecError
from quant.common.text import printable
from quant.scheme import FULL_BITS, NEAR_FULL_BITS

SCRIPT = "serve.sh"


@dataclass(frozen=True)
class VllmPlan:
    """A `plan` that vLLM can serve, of the file `source`; `stored`: the configuration of weights
    whose codes are kept. SpecError, with the remedy, for what vLLM cannot do.
    """

    plan: PlanSpec
    source: str
    stored: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise SpecError(f"vLLM cannot serve {self.source}: {problem}")

    @property
    def method(self) -> str | None:
        """The format of weights to write; None where the model's own ones serve."""
        if self._bits <= {FULL_BITS} or self.stored is not None:
            return None
        return GPTQ_METHOD if self._kernel == "gptq_gemm" else COMPRESSED

    @property
    def symmetric(self) -> bool:
        """Whether zeros have to be the middle code."""
        return self.method == GPTQ_METHOD or NEAR_FULL_BITS in self._bits

    @property
    def nodes(self) -> int:
        return len(self._ranks_of_nodes())

    @property
    def notes(self) -> Iterator[str]:
        """What is other than in the plan, and what vLLM needs for it."""
        old = sorted({s.kind.name for s in self.plan.stages if _is_old(s)})
        if old:
            yield (
                f"{', '.join(old)}: below compute capability 7.5, where vLLM 0.32 has no kernels "
                "for quantized weights; serve it with an older release or a fork for such devices "
                f"that has gptq_gemm ({_listed(VLLM_KERNELS['gptq_gemm'])} bit, float16)"
            )
        if self.plan.head_on_first and len(self.plan.stages) > 1:
            yield "the plan has the LM head on the first stage, vLLM computes it on the last"
        if self.plan.kv_bits != FULL_BITS:
            yield (
                f"keys and values are planned with {self.plan.kv_bits} bits; vLLM keeps them in "
                "16, and has room for half as many requests, unless its devices take "
                "--kv-cache-dtype fp8"
            )
        if self.plan.head_bits != FULL_BITS:
            yield (
                f"embedding and LM head are planned with {self.plan.head_bits} bits; vLLM keeps "
                "them in 16, which takes more memory: plan with --head_bits 16"
            )
        if len({stage.dtype for stage in self.plan.stages}) > 1:
            yield f"all stages compute in {self._dtype}: vLLM has one type"
        if self._kernel == "the CPU" and len(self.plan.stages) > 1:
            yield "set VLLM_CPU_OMP_THREADS_BIND to the cores of each stage, as in 0-7|8-15"
        for node, kinds in self._kinds_of_nodes().items():
            if len(kinds) > 1:
                yield (
                    f"node {node} has {' and '.join(kinds)}: set CUDA_VISIBLE_DEVICES to their "
                    f"numbers by nvidia-smi -L in the order of {SCRIPT}"
                )

    def script(self, model: str | None = None) -> str:
        """The script that starts vLLM with the weights beside it, or with `model`."""
        stages, workload = self.plan.stages, self.plan.workload
        longest = max(each.workload.total_length for each in (self.plan, *self._long_rows))
        options = {
            "pipeline-parallel-size": len(stages),
            "tensor-parallel-size": stages[0].degree,
            "dtype": self._dtype,
            "max-model-len": longest,
            "max-num-seqs": workload.global_batch,
        }
        if self._kernel == "gptq_gemm" and self._bits != {FULL_BITS}:
            options["quantization"] = GPTQ_METHOD
        lines = [f"  --{name} {value} \\" for name, value in options.items()]
        weights = '"$(dirname "$0")"' if model is None else shlex.quote(model)
        partition = ",".join(str(len(stage.layers)) for stage in stages)
        return "\n".join(
            [
                "#!/bin/sh",
                _comment(f"vLLM with {self.plan.model.name} over the stages of a plan of llmpq:"),
                *(
                    _comment(
                        f"stage {stage.index}: {_layers(stage)}, {', '.join(stage.device_names)}"
                    )
                    for stage in stages
                ),
                "set -eu",
                *self._devices(),
                f"export VLLM_PP_LAYER_PARTITION={partition}",
                f"exec vllm serve {weights} \\",
                *lines,
                '  "$@"',
                "",
            ]
        )

    @property
    def _long_rows(self) -> tuple[PlanSpec, ...]:
        return () if self.plan.long_rows is None else (self.plan.long_rows,)

    @property
    def _bits(self) -> set[int]:
        return {choice.bits for stage in self.plan.stages for choice in stage.choices}

    @property
    def _kernel(self) -> str:
        oldest = next(filter(_is_old, self.plan.stages), self.plan.stages[0])
        return vllm_kernel(oldest.kind.processor)

    @property
    def _dtype(self) -> str:
        types = {stage.dtype for stage in self.plan.stages}
        one = len(types) == 1 and self._kernel != "gptq_gemm"
        return next(iter(types)) if one else "float16"

    def _problems(self) -> Iterator[str]:
        stages = self.plan.stages
        if self.plan.prefill_plan is not None:
            yield "its stages prefill or decode alone; plan without --max_request_latency_s"
        degrees = sorted({stage.degree for stage in stages})
        if len(degrees) > 1:
            yield (
                f"its stages have {_listed(degrees)} devices, but vLLM has one tensor-parallel "
                "size for all; plan with --tensor_parallel 1, or other --device_numbers"
            )
        for stage in stages:
            if stage.hosted_experts:
                yield (
                    f"experts of layers {_listed(stage.hosted_experts)} lie in the host's memory "
                    f"at stage {stage.index}; plan without host_memory_gib in the cluster file"
                )
            for layer, choice in zip(stage.layers, stage.choices, strict=True):
                if choice.expert_bits != choice.bits:
                    yield (
                        f"layer {layer} has {choice.bits} bits and its experts "
                        f"{choice.expert_bits}, where vLLM's kernels for old devices and for "
                        "experts take one number; plan with one number in --bits"
                    )
        builds = {_build(stage) for stage in stages}
        if len(builds) > 1:
            yield f"its stages need builds of vLLM for {_listed(sorted(builds))}; plan for one kind"
        known = (*VLLM_KERNELS[self._kernel], FULL_BITS)
        for bits in sorted(self._bits.difference(known)):
            kernel = "kernel for CPUs" if self._kernel == "the CPU" else f"kernel {self._kernel}"
            yield (
                f"it has layers of {bits} bits, and vLLM's {kernel} takes {_listed(known)}; plan "
                f"with --format {VLLM}"
            )
        yield from self._problems_of_stored()
        ranks = self._ranks_of_nodes()
        counts = [len(names) for _, names in ranks]
        if len({*counts}) > 1 or len(counts) > len(self._kinds_of_nodes()):
            yield (
                "vLLM numbers the ranks of one node after another, as many on each, and the plan "
                f"has {_listed([f'{len(names)} of {node}' for node, names in ranks])} "
                "in this order; plan for nodes of as many devices, or start it by hand on Ray"
            )

    def _problems_of_stored(self) -> Iterator[str]:
        if self.stored is None:
            return
        method = self.stored.get("quant_method")
        remedy = "plan with the original 16-bit model, and export that"
        if self._kernel == "gptq_gemm" and method != GPTQ_METHOD:
            yield (
                f"its weights are stored as {method!r:.40}, for which there are no kernels below "
                f"compute capability 7.5; {remedy}"
            )
        if self._kernel != "gptq_gemm" and method == GPTQ_METHOD and not self.stored.get("sym"):
            yield f"its GPTQ weights have zeros, and kernels take symmetric ones; {remedy}"

    def _ranks_of_nodes(self) -> list[tuple[str, list[str]]]:
        """Names of devices by their node, in the order of ranks; a node may come twice."""
        ranks = [(stage.node, name) for stage in self.plan.stages for name in stage.device_names]
        return [
            (node, [name for _, name in group])
            for node, group in groupby(ranks, key=lambda rank: rank[0])
        ]

    def _kinds_of_nodes(self) -> dict[str, list[str]]:
        kinds: dict[str, dict[str, None]] = {}
        for stage in self.plan.stages:
            kinds.setdefault(stage.node, {})[stage.kind.name] = None
        return {node: list(names) for node, names in kinds.items()}

    def _devices(self) -> list[str]:
        """Lines that set the order of devices, and on several nodes the rank of each. Names stand
        in comments alone: a plan's are any text.
        """
        nodes = self._ranks_of_nodes()
        if len(nodes) == 1:
            return self._visible(*nodes[0])
        lines = [
            ': "${MASTER_ADDR:?set it to the address of the node of rank 0}"',
            ': "${NODE_RANK:?set it to the rank of this node}"',
            "case $NODE_RANK in",
        ]
        for number, (node, names) in enumerate(nodes):
            own = (f"    {line}" for line in self._visible(node, names))
            lines += [f"  {number}) {_comment(node)}", *own, "    ;;"]
        rank, address = '--node-rank "$NODE_RANK"', '--master-addr "$MASTER_ADDR"'
        return [
            *lines,
            '  *) echo "there is no node of rank $NODE_RANK" >&2; exit 2 ;;',
            "esac",
            f'set -- --nnodes {len(nodes)} {rank} {address} "$@"',
            '[ "$NODE_RANK" = 0 ] || set -- --headless "$@"',
        ]

    def _visible(self, node: str, names: Sequence[str]) -> list[str]:
        if self._kernel == "the CPU":
            return []
        order = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        if len(self._kinds_of_nodes()[node]) > 1:
            why = "set it to the numbers of its GPUs, in the order above"
            return [order, f': "${{CUDA_VISIBLE_DEVICES:?{why}}}"']
        return [order, f"export CUDA_VISIBLE_DEVICES={','.join(map(_number, names))}"]


def _comment(text: str) -> str:
    return f"# {printable(' '.join(text.split()))}"


def _number(device: str) -> str:
    """The number of a device among those of its kind on its node."""
    return str(int(device.rpartition(":")[2]))


def _is_old(stage: StagePlan) -> bool:
    return is_old(stage.kind.processor)


def _build(stage: StagePlan) -> str:
    if stage.kind.is_cpu:
        return "CPUs"
    return "AMD's GPUs" if stage.kind.rocm_architecture else "NVIDIA's GPUs"


def _layers(stage: StagePlan) -> str:
    runs = [(bits, len([*run])) for bits, run in groupby(stage.bitwidths)]
    words = ", ".join(f"{count} of {bits} bit" for bits, count in runs)
    return f"layers {stage.layers.start} to {stage.layers.stop - 1} ({words})"


def _listed(values: Sequence[object]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

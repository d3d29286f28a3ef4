"""The models of ExeGPT's table 1 on the GPUs of its table 2, in half precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import ModelShape, shape_from_config
from planner.options import PlanOptions
from planner.search.costs import planning_costs
from planner.workload import Workload

BITS = 16
VOCABULARY = 50272
"""OPT's; GPT-3 has 50,257 tokens, which engines pad for tensor parallelism as OPT does."""
POSITIONS = 2048

_OPTIONS = PlanOptions(bits=(BITS,), theta=0.0, dtype="float16", head="last")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node of a cluster of table 2; rates of links in one direction."""

    name: str
    a_node: int
    link_gbyte_per_s: float
    internode_gbit_per_s: float


A40 = Gpus("A40", 8, 32.0, 100.0)
"""PCI Express 4.0 x16, without the NVLink bridge that joins A40 in pairs; 100 Gbit/s InfiniBand."""
A100 = Gpus("A100-SXM4-80GB", 8, 300.0, 1600.0)
"""Azure's NDm A100 v4: NVLink 3.0, eight InfiniBand adapters of 200 Gbit/s."""


@dataclass(frozen=True)
class Model:
    """A model of table 1 on so many GPUs, the tasks that the paper runs on it (sections 7.3 and
    7.4), and whether it counts it among the small and mid-sized or the large ones.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    gpus: Gpus
    count: int
    small_tasks: tuple[str, ...] = ()
    large_tasks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name with its GPUs."""
        return f"{self.name}, {self.count} {self.gpus.name.partition('-')[0]}"

    @property
    def tasks(self) -> tuple[str, ...]:
        """All its tasks, each once."""
        return tuple(dict.fromkeys((*self.small_tasks, *self.large_tasks)))

    @property
    def whole_node(self) -> int:
        """GPUs of a node, which FasterTransformer's tensor-parallel groups have."""
        return min(self.gpus.a_node, self.count)

    @property
    def shape(self) -> ModelShape:
        """Its shape, as an OPT of these sizes: GPT-3's layers are alike."""
        values = {
            "model_type": "opt",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "ffn_dim": 4 * self.hidden_size,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": POSITIONS,
        }
        return shape_from_config(self.name, values)

    @property
    def cluster(self) -> ClusterSpec:
        """Its nodes."""
        nodes = [
            {
                "name": f"node{first // self.gpus.a_node}",
                "accelerators": {self.gpus.name: min(self.gpus.a_node, self.count - first)},
                "link_gbyte_per_s": self.gpus.link_gbyte_per_s,
            }
            for first in range(0, self.count, self.gpus.a_node)
        ]
        network = {"internode_gbit_per_s": self.gpus.internode_gbit_per_s}
        return ClusterSpec.from_dict({"name": self.label, "nodes": nodes, "network": network})

    @cached_property
    def costs(self) -> CostModel:
        """Seconds and bytes of its parts, by datasheets."""
        return planning_costs(self.cluster, self.shape, Workload(1, 1, 1), _OPTIONS)[0]


_SMALL, _LARGE = ("S", "T", "C1"), ("G", "C1", "C2")

MODELS = (
    Model("OPT 13B", 40, 5120, 40, A40, 4, small_tasks=_SMALL),
    Model("GPT-3 39B", 48, 8192, 64, A40, 16, small_tasks=_SMALL),
    Model("GPT-3 101B", 80, 10240, 80, A100, 16, small_tasks=_SMALL, large_tasks=_LARGE),
    Model("GPT-3 175B", 96, 12288, 96, A100, 16, large_tasks=_LARGE),
    Model("GPT-3 175B", 96, 12288, 96, A40, 32, large_tasks=_LARGE),
    Model("GPT-3 341B", 120, 15360, 120, A40, 48, large_tasks=_LARGE),
)
"""All but T5 11B: an encoder-decoder model, which llmpq does not run."""

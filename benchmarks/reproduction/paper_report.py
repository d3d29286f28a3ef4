"""The outcome of `paper_tables` as Markdown: latencies, speed-ups, bitwidths, rank correlation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from scipy.stats import spearmanr

from benchmarks.lab import table_row
from benchmarks.reproduction.profiles_2023 import EXTRAPOLATED_DEVICES, P100
from planner.workload import Workload

LLM_PQ, PIPEEDGE, UNIFORM, LLMPQ = "LLM-PQ", "PipeEdge", "Uniform", "llmpq"
BASELINES = (PIPEEDGE, UNIFORM)
PAPER_SCHEMES = (LLM_PQ, *BASELINES)
FLEXGEN, FLEXGEN_INT8 = "FlexGen", "FlexGen-int8"
OFFLOADING = (FLEXGEN, FLEXGEN_INT8)
FLEXGEN_MODELS = "opt-"  # section 6.1: it is made for OPT and has no results on BLOOM


@dataclass(frozen=True)
class PaperResult:
    """The paper's figures of a scheme; `bits` is the bitwidth that its perplexity tells."""

    latency_s: float
    perplexity: float
    bits: int | None


@dataclass(frozen=True)
class Case:
    """One cluster of one table; `paper` by scheme, None where it ran out of memory."""

    table: int
    cluster: int
    model: str
    workload: Workload
    theta: float
    devices: tuple[str, ...]
    paper: Mapping[str, PaperResult | None]

    @property
    def extrapolated(self) -> str:
        """Mark of rows whose layer times are not all measured: `*` in part, `**` for A100, A800."""
        if set(self.devices) & set(EXTRAPOLATED_DEVICES):
            return "**"
        return "*" if P100 in self.devices else ""


@dataclass(frozen=True)
class Scheme:
    """The simulated result of a scheme on one cluster; None where it does not fit.

    `streamed_bytes`: of offloading, what the fullest GPU takes from its host a round.
    """

    latency_s: float | None
    bits: str
    streamed_bytes: float | None = None


@dataclass(frozen=True)
class Outcome:
    """All schemes on one cluster, and the wall-clock seconds of planning them.

    `less_gib`: memory that each GPU lacked. `at_paper_bits`: the baselines once more, at the
    bitwidth that the paper used.
    """

    case: Case
    less_gib: int
    schemes: Mapping[str, Scheme]
    at_paper_bits: Mapping[str, Scheme]
    seconds: float


Figure = Callable[[Outcome], float | None]


def report(outcomes: Sequence[Outcome]) -> str:
    """Markdown of all tables; `outcomes` hold every cluster at each amount of memory."""
    main = [each for each in outcomes if each.less_gib == 0]
    return "\n\n".join(
        [
            _latencies(main),
            _speedups(main),
            _offloading(main),
            _bitwidths(main),
            _at_paper_bits(main),
            _memory(outcomes),
            _correlations(outcomes),
            _means(outcomes),
        ]
    )


def _latencies(outcomes: Sequence[Outcome]) -> str:
    header = ["table", "cluster"]
    header += [f"{scheme} {source}" for scheme in PAPER_SCHEMES for source in ("paper", "ours")]
    rows = [
        [
            *_names(each),
            *(
                number(latency_s, ".1f")
                for scheme in PAPER_SCHEMES
                for latency_s in (_paper_s(scheme)(each), _own_s(scheme)(each))
            ),
            number(each.schemes[LLMPQ].latency_s, ".1f"),
        ]
        for each in outcomes
    ]
    return _table("Seconds a batch", [*header, "llmpq's own objective"], rows)


def _speedups(outcomes: Sequence[Outcome]) -> str:
    pairs = [(LLM_PQ, PIPEEDGE), (LLM_PQ, UNIFORM), (UNIFORM, PIPEEDGE)]
    header = ["table", "cluster"]
    header += [f"{fast} / {slow} {source}" for fast, slow in pairs for source in ("paper", "ours")]
    rows = [
        [
            *_names(each),
            *(
                number(ratio(each), ".2f")
                for fast, slow in pairs
                for ratio in (_paper_speedup(fast, slow), _own_speedup(fast, slow))
            ),
        ]
        for each in outcomes
    ]
    return _table("Throughput against a baseline", header, rows)


def _offloading(outcomes: Sequence[Outcome]) -> str:
    """FlexGen's estimates, and how fast LLM-PQ is beside it, on models that FlexGen serves.

    The last column: at what rate, if all of the paper's time were streaming. A batch has as many
    rounds as new tokens; the first is the prefill.
    """
    header = ["table", "cluster", "scheme", "paper", "ours", "LLM-PQ / it, paper", "ours"]
    header += ["GB a round, fullest GPU", "GB/s of that in the paper's time"]
    rows = [
        [*_names(each), name, *(number(f(each), form) for f, form in _offloading_figures(name))]
        for each, name in product(outcomes, OFFLOADING)
        if each.case.model.startswith(FLEXGEN_MODELS)
    ]
    return _table("Offloading, estimated (seconds a batch)", header, rows)


def _offloading_figures(name: str) -> list[tuple[Figure, str]]:
    def streamed_gbyte(each: Outcome) -> float | None:
        return (each.schemes[name].streamed_bytes or 0) / 1e9 or None

    def paper_gbyte_per_s(each: Outcome) -> float | None:
        per_round_s = _quotient(_paper_s(name)(each), each.case.workload.new_tokens)
        return _quotient(streamed_gbyte(each), per_round_s)

    return [
        (_paper_s(name), ".1f"),
        (_own_s(name), ".1f"),
        (_paper_speedup(LLM_PQ, name), ".2f"),
        (_own_speedup(LLM_PQ, name), ".2f"),
        (streamed_gbyte, ".1f"),
        (paper_gbyte_per_s, ".1f"),
    ]


def _bitwidths(outcomes: Sequence[Outcome]) -> str:
    header = ["table", "cluster", *(f"{name} bits" for name in (*PAPER_SCHEMES, LLMPQ))]
    rows = [
        [*_names(each), *(each.schemes[name].bits or "–" for name in (*PAPER_SCHEMES, LLMPQ))]
        for each in outcomes
    ]
    return _table("Bitwidths chosen here (bits x layers)", header, rows)


def _at_paper_bits(outcomes: Sequence[Outcome]) -> str:
    header = ["table", "cluster"]
    for name in BASELINES:
        header += [f"{name} bits", "paper", "ours", "paper / ours"]
    rows = []
    for each in outcomes:
        cells = _names(each)
        for name in BASELINES:
            paper, own = _paper_s(name)(each), _own_s_at_paper_bits(name)(each)
            cells += [
                each.at_paper_bits[name].bits or "–",
                number(paper, ".1f"),
                number(own, ".1f"),
                number(_quotient(paper, own), ".2f"),
            ]
        rows.append(cells)
    return _table("Baselines at the bitwidth that the paper's perplexity tells", header, rows)


def _memory(outcomes: Sequence[Outcome]) -> str:
    """Latency and, of the baselines, bitwidth at each amount of memory."""
    amounts = sorted({each.less_gib for each in outcomes})
    header = ["table", "cluster"]
    for name in PAPER_SCHEMES:
        header += [f"{name} paper", *(f"-{less} GiB" if less else "ours" for less in amounts)]
    rows = []
    for each in outcomes:
        if each.less_gib == amounts[0]:
            same = [other for other in outcomes if other.case == each.case]
            cells = _names(each)
            for name in PAPER_SCHEMES:
                paper = each.case.paper[name]
                cells.append(_with_bits(name, _paper_s(name)(each), str(paper and paper.bits)))
                cells += [
                    _with_bits(name, other.schemes[name].latency_s, other.schemes[name].bits)
                    for other in sorted(same, key=lambda other: other.less_gib)
                ]
            rows.append(cells)
    return _table("With less memory on every GPU (bitwidth in brackets)", header, rows)


def _with_bits(name: str, latency_s: float | None, bits: str) -> str:
    text = number(latency_s, ".0f")
    return text if latency_s is None or name not in BASELINES else f"{text} ({bits})"


def _groups(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """Yield all clusters, then those with measured layer times alone, for each amount of memory."""
    for less_gib in sorted({each.less_gib for each in outcomes}):
        chosen = [each for each in outcomes if each.less_gib == less_gib]
        suffix = f", {less_gib} GiB less" if less_gib else ""
        yield f"all{suffix}", chosen
        measured = [each for each in chosen if not each.case.extrapolated]
        yield f"measured devices{suffix}", measured


def _correlations(outcomes: Sequence[Outcome]) -> str:
    quantities: dict[str, list[tuple[Figure, Figure]]] = {
        "latency of all schemes": [(_paper_s(name), _own_s(name)) for name in PAPER_SCHEMES],
        "LLM-PQ / PipeEdge": [(_paper_speedup(LLM_PQ, PIPEEDGE), _own_speedup(LLM_PQ, PIPEEDGE))],
        "LLM-PQ / Uniform": [(_paper_speedup(LLM_PQ, UNIFORM), _own_speedup(LLM_PQ, UNIFORM))],
        "latency of the baselines at the paper's bitwidth": [
            (_paper_s(name), _own_s_at_paper_bits(name)) for name in BASELINES
        ],
        "latency of offloading": [(_paper_s(name), _own_s(name)) for name in OFFLOADING],
    }
    rows = []
    for label, chosen in _groups(outcomes):
        for quantity, functions in quantities.items():
            points = [(f(each), g(each)) for each in chosen for f, g in functions]
            rows.append([label, quantity, *_spearman(points)])
        agreed, compared = _same_order(chosen)
        rows.append([label, "pairs of schemes in the paper's order", str(compared), str(agreed)])
    return _table("Rank correlation", ["rows", "of", "points", "Spearman's rho or count"], rows)


def _means(outcomes: Sequence[Outcome]) -> str:
    """Mean of LLM-PQ's speed-up over PipeEdge at each amount of memory."""
    amounts = sorted({each.less_gib for each in outcomes})
    header = ["rows", "points", "paper", *(f"-{less} GiB" if less else "ours" for less in amounts)]
    paper, own = _paper_speedup(LLM_PQ, PIPEEDGE), _own_speedup(LLM_PQ, PIPEEDGE)
    kinds: dict[str, Callable[[Case], bool]] = {
        "table 4": lambda case: case.table == 4,
        "all": lambda case: True,
        "measured devices": lambda case: not case.extrapolated,
    }
    rows = []
    for name, belongs in kinds.items():
        chosen = [each for each in outcomes if belongs(each.case)]
        first = [each for each in chosen if each.less_gib == amounts[0]]
        columns = [[paper(each) for each in first]]
        columns += [[own(each) for each in chosen if each.less_gib == less] for less in amounts]
        rows.append([name, str(len(first)), *(number(_mean(each), ".2f") for each in columns)])
    return _table("Mean of LLM-PQ / PipeEdge", header, rows)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _paper_s(scheme: str) -> Figure:
    def latency_s(each: Outcome) -> float | None:
        paper = each.case.paper[scheme]
        return None if paper is None else paper.latency_s

    return latency_s


def _own_s(scheme: str) -> Figure:
    return lambda each: each.schemes[scheme].latency_s


def _own_s_at_paper_bits(scheme: str) -> Figure:
    return lambda each: each.at_paper_bits[scheme].latency_s


def _paper_speedup(fast: str, slow: str) -> Figure:
    return lambda each: _quotient(_paper_s(slow)(each), _paper_s(fast)(each))


def _own_speedup(fast: str, slow: str) -> Figure:
    return lambda each: _quotient(_own_s(slow)(each), _own_s(fast)(each))


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _spearman(points: Sequence[tuple[float | None, float | None]]) -> tuple[str, str]:
    """Count the points that both sides have, and correlate their ranks."""
    both = [(x, y) for x, y in points if x is not None and y is not None]
    if len(both) < 3:
        return str(len(both)), "–"
    paper, own = zip(*both, strict=True)
    return str(len(both)), f"{spearmanr(paper, own).statistic:.2f}"


def _same_order(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Pairs of schemes on one cluster that the paper ranks, and those ranked so here."""
    agreed = compared = 0
    for each in outcomes:
        for one, other in combinations(PAPER_SCHEMES, 2):
            paper, own = _paper_speedup(one, other)(each), _own_speedup(one, other)(each)
            if paper is not None and own is not None and paper != 1:
                compared += 1
                agreed += (paper > 1) == (own > 1)
    return agreed, compared


def _names(each: Outcome) -> list[str]:
    return [str(each.case.table), f"{each.case.cluster} {each.case.model}{each.case.extrapolated}"]


def number(value: float | None, form: str) -> str:
    """A figure of a table; a dash where there is none."""
    return "–" if value is None else format(value, form)


def bits_by_layers(bitwidths: Sequence[int]) -> str:
    """Layers of each bitwidth: `8x30 16x18`."""
    counts = Counter(bitwidths)
    return " ".join(f"{bits}x{counts[bits]}" for bits in sorted(counts))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a table's cells."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join(table_row(line) for line in lines)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"### {title}\n\n{markdown_table(header, rows)}"

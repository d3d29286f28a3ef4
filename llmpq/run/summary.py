"""What a run will do and what it has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from actors.messages import StageStats


@dataclass(frozen=True)
class RunSize:
    """Size of a run, where it is known: rows, the tokens they may generate at most, and the
    rows that an earlier run had done (`resumed`), which `prompts` does not count.
    """

    prompts: int
    max_tokens: int
    resumed: int = 0


@dataclass(frozen=True)
class RunSummary:
    """Figures of a run that has ended: `load_s` seconds until its stages were loaded, `seconds` of
    generating, and the figures of its `stages` in pipeline order. `resumed` as in `RunSize`.
    """

    prompts: int
    errors: int
    generated_tokens: int
    load_s: float
    seconds: float
    stages: tuple[StageStats, ...]
    resumed: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, without loading."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

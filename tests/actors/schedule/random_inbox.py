"""An inbox in which requests come, and are given up, by chance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from actors.messages import MicroBatch, Request, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.live_run import Inbox, Mail
from planner.scheduling import RequestSchedule
from tests.actors.schedule.token_pipeline import TokenPipeline


class RandomInbox(Inbox):
    """Puts and cancels requests by chance whenever it is looked into; then it is closed."""

    def __init__(self, random: Random, requests: list[Request]) -> None:
        super().__init__(1)
        self.coming = deque(requests)
        self.cancelled: set[str] = set()
        self.ended: set[str] = set()
        self._random, self._put = random, list[str]()

    def take(self, wait: bool) -> Mail:
        while self.coming and (wait or self._random.random() < 0.3):
            self._put.append(self.coming[0].custom_id)
            self.put([self.coming.popleft()])
            wait = False
        if self._put and self._random.random() < 0.2:
            custom_id = self._random.choice(self._put)
            self.cancel([custom_id])
            if custom_id not in self.ended:
                self.cancelled.add(custom_id)
        elif not self.coming:
            self.close()
        return super().take(wait)


class ChangingInbox(RandomInbox):
    """Has `driver` follow one of the other schedules, one after the other, by chance."""

    def __init__(
        self,
        random: Random,
        requests: list[Request],
        driver: PipelineDriver,
        others: list[RequestSchedule],
    ) -> None:
        super().__init__(random, requests)
        self._driver, self._others = driver, others

    def take(self, wait: bool) -> Mail:
        if self._others and self._random.random() < 0.05:
            self._driver.follow(self._others.pop())
        return super().take(wait)


@dataclass
class LimitedPipeline(TokenPipeline):
    """Refuses micro-batches of more than `most` requests, and slots from `slots` on."""

    most: int = 0
    slots: int = 0

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        assert len(batch.slots) <= self.most
        assert max(batch.slots.tolist()) < self.slots
        return super().submit(batch, token_ids)

"""An inbox in which requests come, and are given up, by chance."""

from __future__ import annotations

from collections import deque
from random import Random

from actors.messages import Request
from actors.schedule.live import Inbox, Mail


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

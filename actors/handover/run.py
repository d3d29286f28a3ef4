"""A live run on stages that prefill and stages that decode: the face of one `LiveGeneration`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from queue import SimpleQueue
from threading import Condition, Thread

from actors.handover.ledger import DividedLedger
from actors.handover.transfer import Moving, Transfer
from actors.messages import Progress, Request
from actors.recovery.faults import RunInterruptedError
from actors.recovery.generation import LiveGeneration

OnLost = Callable[[int], None]
"""Told of requests whose keys and values were lost on their way."""


class DividedLive:
    """Runs requests from when they are submitted: their first token comes from the stages that
    `prefill`, the others from those that `decode`; keys and values go between them by `transfer`.

    One thread reads `events`; any thread may call the other methods. Three more threads wait: for
    either kind of stages, each of which goes on by itself after its faults, and for keys and
    values. What is lost on the way is prefilled again by the stages that decode; `on_lost` is told
    of it. `has_ended`: all events were read.
    """

    def __init__(
        self,
        prefill: LiveGeneration,
        decode: LiveGeneration,
        transfer: Transfer,
        ledger: DividedLedger,
        on_lost: OnLost,
    ) -> None:
        self._prefill, self._decode, self._transfer = prefill, decode, transfer
        self._ledger = ledger
        self._on_lost = on_lost
        self._changed = Condition()  # around all that follows
        self._told: list[Progress] = []
        self._error: BaseException | None = None
        self._closed = self._is_interrupted = False
        self.has_ended = False
        self._moves: SimpleQueue[tuple[tuple[str, ...], Moving] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._guarded, args=(work,), name=f"llmpq-{name}", daemon=True)
            for name, work in (
                ("prefill", self._read_prefill),
                ("handover", self._move),
                ("decode", self._read_decode),
            )
        ]

    def submit(self, *requests: Request) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("a live generation takes no requests after close()")
            for request in requests:
                self._ledger.add(request)
            self._go_on()

    def cancel(self, custom_id: str) -> None:
        with self._changed:
            place = self._ledger.cancel(custom_id)
            self._told = [each for each in self._told if each.custom_id != custom_id]
            if place == "prefilling":
                self._prefill.cancel(custom_id)
            elif place == "decoding":
                self._decode.cancel(custom_id)
            self._go_on()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._go_on()

    @property
    def under_way(self) -> int:
        return len(self._ledger)

    @property
    def wanted(self) -> int:
        with self._changed:
            return self._ledger.wanted

    @property
    def unfinished(self) -> tuple[Request, ...]:
        with self._changed:
            return self._ledger.unfinished

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        with self._changed:
            return self._ledger.tokens

    def interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()
        self._prefill.interrupt()
        self._decode.interrupt()

    def join(self, limit_s: float | None = None) -> None:
        """Wait until all threads have ended, at most so long for each, repairs included."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(limit_s)

    def events(self) -> Generator[tuple[Progress, ...]]:
        for thread in self._threads:
            thread.start()
        try:
            while (told := self._next_events()) is not None:
                if told:
                    yield told
            self.join()
        finally:
            if not self.has_ended:
                self.interrupt()

    def halt(self) -> tuple[Progress, ...]:
        self.interrupt()
        self.join()
        with self._changed:
            told, self._told = tuple(self._told), []
        return told

    def _next_events(self) -> tuple[Progress, ...] | None:
        """What is new; None at the end. Raises what stops a side, and `RunInterruptedError`."""
        with self._changed:
            while not (
                self._told or self._is_interrupted or self._error is not None or self._is_done
            ):
                self._changed.wait()
            told, self._told = tuple(self._told), []
            if told:
                return told
            if self._is_interrupted:
                raise RunInterruptedError
            if self._error is not None:
                raise self._error
            self.has_ended = True
            return None

    @property
    def _is_done(self) -> bool:
        return self._closed and not len(self._ledger)

    def _go_on(self) -> None:
        """Submit requests whose turn it is; close the sides to which nothing more will come."""
        self._changed.notify_all()
        while True:
            to_prefill, to_decode = self._ledger.begin()
            if not to_prefill and not to_decode:
                break
            if to_prefill:
                self._prefill.submit(*to_prefill)
            if to_decode:
                self._decode.submit(*to_decode)
        if self._closed and not self._ledger.has_any("waiting"):
            self._prefill.close()
            if not self._ledger.has_any("prefilling", "moving"):
                self._decode.close()

    def _read_prefill(self) -> None:
        for told in self._prefill.events():
            with self._changed:
                new, moving, unwanted = self._ledger.prefilled(told)
                self._told += new
                numbers = [self._ledger.number_of(name) for name in moving]
                tokens = self._ledger.prompt_tokens_of(moving)
                self._go_on()
            self._transfer.forget_prefilled(unwanted)
            if numbers:
                self._moves.put((moving, self._transfer.begin(numbers, tokens)))
        self._moves.put(None)

    def _move(self) -> None:
        while (move := self._moves.get()) is not None:
            names, moving = move
            arrived = self._transfer.wait(moving)
            if len(arrived) < len(moving.numbers):
                self._on_lost(len(moving.numbers) - len(arrived))
            with self._changed:
                requests = self._ledger.moved(names, arrived, moving.epoch)
                if requests:
                    self._decode.submit(*requests)
                self._go_on()
            wanted = {request.host_key.number for request in requests if request.host_key}
            self._transfer.forget_arrived([each for each in arrived if each not in wanted])

    def _read_decode(self) -> None:
        for told in self._decode.events():
            with self._changed:
                self._told += self._ledger.decoded(told)
                self._go_on()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do `work`; an error of it ends the run."""
        try:
            work()
        except BaseException as error:  # for the thread that reads the events
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._prefill.interrupt()
            self._decode.interrupt()
            self._moves.put(None)

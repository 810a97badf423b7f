"""The server's side of a run: it combines what clients ask, and never sees data.

It averages points and directions, takes largest numbers and sums, keeps count, and writes down
everything it knows before an answer leaves. It does not know what the numbers mean.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from aipod.flower import _requests
from aipod.flower._averages import Cuts
from aipod.flower._combine import combine, mean_of
from aipod.flower._exchange import Exchanges, Replies
from aipod.flower._progress import (
    DivergedError,
    Hello,
    NotEnoughClientsError,
    Post,
    Progress,
    Terms,
)
from aipod.flower._reply import Expected
from aipod.flower._roll import Roll
from aipod.flower._unmask import SecureRounds

# How often a client may lose its state before it is refused: each time all corrections begin anew,
# and without corrections clients that differ go astray.
_LOSSES = 3
# Seconds between two looks for clients that have come back.
_LOOK = 1.0


class Coordinator:
    """Leads one run to its end.

    - `expected`: checks replies; a client that sends a bad one is absent until it is greeted again.
    - `digest`: of the solver; clients with another one are refused.
    - `start`: the shared part of the state before the first step.
    - `save`: called on `progress` before any new answer leaves.
    - `record`: called on each recorded step and the mean of the clients' models there.
    """

    def __init__(
        self,
        post: Post,
        terms: Terms,
        progress: Progress,
        *,
        expected: Expected,
        digest: str,
        start: Mapping[str, np.ndarray],
        save: Callable[[], None],
        record: Callable[[int, dict[str, np.ndarray]], None],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.terms, self.progress, self._start = terms, progress, start
        self._save, self._record, self._log = save, record, log
        self._cuts, self._expected = Cuts(terms.cut, log), expected
        self._newest: set[str] = set(progress.answers)
        self._lost: Counter[int] = Counter()
        self._roll = roll = Roll(post, terms, progress, digest, log)
        self._exchanges = Exchanges(post, terms, progress, roll, expected, self._look, log)
        self._sums = SecureRounds(self._exchanges, roll, terms, progress, expected)

    def run(self) -> None:
        """Until the last step is made; raises when there are too few clients, or divergence."""
        self._gather()
        replies, failing = Replies(), float("inf")
        while True:
            replies = self._enough(replies)
            step = next(iter(replies.values())).step
            self._take_models(replies)
            if step >= self.terms.steps:
                return
            if not self._answer(replies, step):
                # Too few are left of a secure sum; those go on when others are back.
                replies = {i: r for i, r in replies.items() if i in self._roll.members}
                failing = min(failing, time.monotonic())
                if time.monotonic() - failing > self.terms.wait:
                    raise self._too_few(len(replies), "no secure sum came about")
                continue
            failing = float("inf")
            update = _requests.update(self.terms, self.progress, self._newest)
            replies = self._exchanges.send(dict.fromkeys(self._roll.members, update))

    def _look(self) -> None:
        self._roll.look(_LOOK)

    def _gather(self) -> None:
        """Waits until all clients are there, or for a while and then for as many as are needed."""
        self._look()
        deadline = time.monotonic() + self.terms.wait
        while True:
            late = time.monotonic() > deadline
            self._roll.look(0.0 if late else _LOOK)
            if self._roll.complete(late=late):
                return
            if late:
                raise self._too_few(len(self._roll.arrived))
            time.sleep(self.terms.poll)

    def _enough(self, replies: Replies) -> Replies:
        """Replies that agree, with those of clients that came back, and as many as are needed."""
        deadline = time.monotonic() + self.terms.wait
        self._exchanges.diverged.clear()
        while True:
            self._look()
            replies = self._exchanges.agreeing(replies | self._readmit())
            if replies:
                replies = self._exchanges.agreeing(self._admit(replies))
            if len(replies) >= self._roll.needed:
                return replies
            # Twice, since a message may be damaged on its way.
            diverged = {index for index, times in self._exchanges.diverged.items() if times > 1}
            if len(diverged | set(replies)) >= self._roll.needed:
                raise self._divergence(self.progress.step + 1)
            if time.monotonic() > deadline:
                raise self._too_few(len(replies))
            time.sleep(self.terms.poll)

    def _too_few(self, found: int, what: str = "") -> NotEnoughClientsError:
        self._save()
        troubles = self._roll.troubles()
        troubles |= {f"client {index}": reason for index, reason in self._exchanges.absent.items()}
        for index, hello in self._roll.arrived.items():
            if hello.exchange > self.progress.exchange:
                troubles[f"client {index}"] = "it is ahead of this checkpoint, an older copy"
        why = "".join(f"; {who}: {reason}" for who, reason in troubles.items())
        what = what or f"only {found} of at least {self._roll.needed} clients"
        return NotEnoughClientsError(
            f"{what} in {self.terms.wait:g} s; everything is saved, go on with resume-from when "
            f"they are back{why}."
        )

    # Clients that come back

    def _readmit(self) -> Replies:
        """Clients without which no round has gone on: they answer the same request as the rest."""
        progress, parcels = self.progress, {}
        for index, hello in list(self._roll.arrived.items()):
            if index in self._roll.members:
                continue
            owed = progress.owed.get(index)
            if progress.step < 0:
                parcels[index] = _requests.beginning(self.terms, progress, self._start)
                self._begin_known([index], self._start)
            elif owed is not None and owed.exchange == progress.exchange and self._sane(hello):
                parcels[index] = _requests.repeated(self.terms, progress)
            else:
                continue
            self._roll.join(hello)
        return self._exchanges.send(parcels)

    def _sane(self, hello: Hello) -> bool:
        """Whether a client's own state is what it should be: neither lost nor from elsewhere."""
        owed = self.progress.owed[hello.index]
        if hello.index in self._exchanges.strayed:
            return False
        return owed.step <= hello.step and hello.exchange <= self.progress.exchange

    def _late(self) -> list[Hello]:
        """Clients that are back; those that lose their state again and again are refused."""
        late = [h for i, h in self._roll.arrived.items() if i not in self._roll.members]
        for hello in late:
            if self._lost[hello.index] >= _LOSSES and self._is_lost(hello):
                self._roll.turn_out(hello, f"it has lost its state {_LOSSES} times before")
        return [hello for hello in late if hello.index in self._roll.arrived]

    def _is_lost(self, hello: Hello) -> bool:
        return hello.index in self.progress.counted and not self._sane(hello)

    def _admit(self, replies: Replies) -> Replies:
        """Lets clients that missed a round, or lost their state, go on from where the others are.

        This is possible only at the beginning of an outer step. When a client has lost its
        corrections, those of the others no longer add up to zero: then all of them begin anew.
        """
        terms, progress = self.terms, self.progress
        late = self._late()
        first = next(iter(replies.values()))
        if not late or first.step == progress.step or not first.finite:
            return replies
        paused = self._exchanges.send(dict.fromkeys(replies, _requests.pause(terms, progress)))
        given = {
            index: reply.shared
            for index, reply in paused.items()
            if reply.finite and reply.shared and reply.step == first.step
        }
        if not given:
            return {index: replies[index] for index in paused}
        shared = self._mean(given)
        lost = [h.index for h in late if self._is_lost(h)]
        reset = bool(lost)
        self._lost.update(lost)
        parcels = {}
        for hello in late:
            missed = hello.index in progress.owed and hello.index in progress.counted
            parcels[hello.index] = (
                _requests.catch_up(terms, progress, hello.index, shared)
                if missed and not reset
                # It took no part since corrections were zero: its own are zero too.
                else _requests.restart(terms, progress, shared)
            )
            if reset or not missed:
                self._begin_known([hello.index], shared)
            self._log(f"client {hello.index} goes on from where the others are")
            self._roll.join(hello)
        if not reset:
            return {index: replies[index] for index in paused} | self._exchanges.send(parcels)
        self._log("a client lost its corrections: those of all clients begin anew at zero")
        progress.counted, progress.owed = set(), {}
        # With short messages all must begin from the very same numbers.
        common = None if self._expected.wire is None else shared
        self._begin_known(paused, shared)
        parcels |= dict.fromkeys(paused, _requests.restart(terms, progress, common))
        # Models that came with the earlier replies are not sent again.
        return {
            index: dataclasses.replace(reply, models={**replies[index].models, **reply.models})
            if index in replies
            else reply
            for index, reply in self._exchanges.send(parcels).items()
        }

    def _begin_known(self, clients: Iterable[int], shared: Mapping[str, np.ndarray]) -> None:
        """What is known of clients whose corrections begin at zero, from this state."""
        if self._expected.wire is not None:
            self.progress.known |= dict.fromkeys(clients, self._expected.first_known(shared))
            self._exchanges.strayed -= set(clients)

    # What is answered

    def _take_models(self, replies: Replies) -> None:
        """Records the mean of the models at each step for which the clients have sent one."""
        models: dict[int, dict[int, Mapping[str, np.ndarray]]] = {}
        for index, reply in replies.items():
            for step, model in reply.models.items():
                if not reply.finite:
                    raise self._divergence(step)
                models.setdefault(step, {})[index] = model
        for step, found in sorted(models.items()):
            self._record(step, self._mean(found))

    def _mean(self, found: Mapping[int, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        # In the order of their indices: who replies first must not change the last digit.
        present = sorted(found)
        weights = [self.progress.weights[index] for index in present]
        models = [found[index] for index in present]
        return mean_of(models, weights, robust=self.terms.average is not None)

    def _divergence(self, step: int) -> DivergedError:
        return DivergedError(
            f"diverged at outer step {step}: what the clients would have to average is NaN."
        )

    def _answer(self, replies: Replies, step: int) -> bool:
        """Combines the questions of one outer step, and saves the answers before they leave.

        Returns False when a secure sum has lost too many clients.
        """
        progress = self.progress
        asked = {index: reply.asked for index, reply in replies.items() if reply.finite}
        average = self.terms.average
        new: dict[str, np.ndarray] = {}
        present = set(replies)
        if asked and self.terms.secure:
            found = self._sums.mean({index: set(names) for index, names in asked.items()})
            if found is None:
                return False
            new, present = found
        elif asked:
            new = combine(self._cuts(asked), progress.weights, progress.clients, average)
        if not new:
            raise self._divergence(step + 1)
        if step != progress.step:
            progress.answers = {}
        progress.step = step
        progress.answers = progress.answers | new
        self._newest = set(new)
        progress.exchange += 1
        progress.rounds += any(not name.startswith("number.") for name in new)
        progress.counted |= present
        if self._expected.wire is not None:
            for index in present:
                new_rows = {n.rpartition(".")[0]: v for n, v in asked[index].items()}
                rows = progress.known[index]
                progress.known[index] = rows | {n: v for n, v in new_rows.items() if n in rows}
        for index in present:
            progress.owed.pop(index, None)
            if index in self._roll.members:
                self._exchanges.absent.pop(index, None)
            else:
                # It was counted, and went before the sum was known.
                self._exchanges.owe(index)
        self._save()
        return True

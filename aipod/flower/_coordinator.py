"""The server's side: it combines what clients ask, and never sees data.

It averages points and directions, takes largest numbers and sums, keeps count, and writes down all
it knows before any answer leaves. What the numbers mean it does not know.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from aipod.flower._combine import combine
from aipod.flower._parcel import Parcel, Word
from aipod.flower._parts import mean_of
from aipod.flower._progress import (
    DivergedError,
    Hello,
    NotEnoughClientsError,
    Owed,
    Post,
    Progress,
    Terms,
)

# Seconds between two looks for clients that have come back.
_LOOK = 1.0


Replies = dict[int, Parcel]


class Coordinator:
    """Leads one run to its end.

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
        digest: str,
        start: Mapping[str, np.ndarray],
        save: Callable[[], None],
        record: Callable[[int, dict[str, np.ndarray]], None],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.post, self.terms, self.progress = post, terms, progress
        self._digest, self._start = digest, start
        self._save, self._record, self._log = save, record, log
        self.members: dict[int, int] = {}
        self._arrived: dict[int, Hello] = {}
        self._greeted: dict[str, tuple[int, float]] = {}
        self._refused: dict[int, str] = {}
        self._silent: dict[int, str] = {}
        self._looked = -float("inf")
        self._newest: set[str] = set(progress.answers)
        for index in progress.counted - set(progress.owed):
            self._owe(index)

    def run(self) -> None:
        """Until the last step is made; raises when there are too few clients, or divergence."""
        self._gather()
        replies: Replies = {}
        while True:
            replies = self._enough(replies)
            step = self._common_step(replies)
            if step >= self.terms.steps:
                return
            self._answer(replies, step)
            replies = self._exchange({index: self._request() for index in self.members})

    # What is said

    def _request(
        self,
        *,
        answers: Mapping[str, np.ndarray] | None = None,
        step: int | None = None,
        shared: Mapping[str, np.ndarray] | None = None,
        **flags: bool,
    ) -> Parcel:
        """The newest answers, unless told otherwise."""
        progress = self.progress
        if answers is None:
            answers = {name: progress.answers[name] for name in sorted(self._newest)}
        words: dict[str, Word] = {
            "action": "exchange",
            "run": progress.run,
            "seed": self.terms.seed,
            "last": self.terms.steps,
            "every": self.terms.every,
            "turn": progress.exchange,
            "step": progress.step if step is None else step,
        }
        words |= {name: flags.get(name, False) for name in ("leave", "reset", "pause")}
        arrays = {f"answer:{name}": value for name, value in answers.items()}
        arrays |= {f"shared:{name}": value for name, value in (shared or {}).items()}
        return Parcel(words, arrays)

    def _exchange(self, parcels: Mapping[int, Parcel]) -> Replies:
        """The replies of those that replied in time; the others are no longer members."""
        nodes = {self.members[index]: index for index in parcels}
        tickets = self.post.send(
            {node: parcels[index] for node, index in nodes.items()}, self.terms.round_timeout
        )
        waiting = {ticket: nodes[node] for node, ticket in tickets.items()}
        for index in set(parcels) - set(waiting.values()):
            self._drop(index, "its node cannot be reached")
        replies: Replies = {}
        deadline = time.monotonic() + self.terms.round_timeout
        while waiting:
            for ticket, found in self.post.collect(list(waiting)).items():
                index = waiting.pop(ticket)
                problem = found if isinstance(found, str) else found.words.get("error")
                if problem is not None:
                    self._drop(index, str(problem))
                elif isinstance(found, Parcel):
                    replies[index] = found
            if waiting and time.monotonic() > deadline:
                for index in waiting.values():
                    self._drop(index, f"no reply in {self.terms.round_timeout:g} s")
                break
            if waiting:
                self._look()
                time.sleep(self.terms.poll)
        self._take_models(replies)
        return replies

    def _drop(self, index: int, reason: str) -> None:
        self._log(f"client {index} is absent: {reason}")
        self.members.pop(index, None)
        self._arrived.pop(index, None)
        self._owe(index)

    def _owe(self, index: int) -> None:
        progress = self.progress
        if index not in progress.owed:
            progress.owed[index] = Owed(progress.step, progress.exchange, dict(progress.answers))

    # Who is there

    def _look(self) -> None:
        """Greets nodes that are no members, and takes in what they say; at most once a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        timeout = self.terms.round_timeout
        self._greeted = {t: g for t, g in self._greeted.items() if now - g[1] < timeout}
        for ticket, found in self.post.collect(list(self._greeted)).items():
            node, _ = self._greeted.pop(ticket)
            if isinstance(found, Parcel):
                self._welcome(node, found.words)
            elif self._silent.get(node) != found:
                # It is greeted again at the next look: it may be starting.
                self._silent[node] = found
                self._log(f"node {node} does not answer: {found}")
        busy = {*self.members.values(), *(node for node, _ in self._greeted.values())}
        busy |= {hello.node for hello in self._arrived.values()} | set(self._refused)
        strangers = [node for node in self.post.nodes() if node not in busy]
        hello = Parcel({"action": "hello", "run": self.progress.run})
        tickets = self.post.send(dict.fromkeys(strangers, hello), timeout)
        self._greeted |= {ticket: (node, now) for node, ticket in tickets.items()}

    def _welcome(self, node: int, words: Mapping[str, Word]) -> None:
        progress = self.progress
        reason = words.get("error")
        if reason is None and words["solver"] != self._digest:
            reason = "its solver has other arguments than the server's"
        if reason is None and progress.clients not in (0, words["clients"]):
            reason = f"it counts {words['clients']} clients, others {progress.clients}"
        if reason is not None:
            self._refused[node] = str(reason)
            self._log(f"node {node} is refused: {reason}")
            return
        index = int(words["index"])
        progress.clients = int(words["clients"])
        progress.weights[index] = float(words["weight"])
        self._arrived[index] = Hello(node, index, int(words["step"]), int(words["exchange"]))

    @property
    def _needed(self) -> int:
        return self.terms.min_nodes or self.progress.clients or 1

    def _gather(self) -> None:
        """Waits until all clients are there, or for a while and then for as many as are needed."""
        self._look()
        deadline = time.monotonic() + self.terms.wait
        while True:
            self._look()
            found = len(self._arrived)
            if 0 < self.progress.clients <= found:
                return
            if time.monotonic() > deadline:
                if found >= self._needed:
                    return
                raise self._too_few(found)
            time.sleep(self.terms.poll)

    def _enough(self, replies: Replies) -> Replies:
        """With the replies of clients that came back, and at least as many as are needed."""
        deadline = time.monotonic() + self.terms.wait
        while True:
            self._look()
            replies = replies | self._readmit()
            if replies:
                replies = self._admit(replies)
            if len(replies) >= self._needed:
                return replies
            if time.monotonic() > deadline:
                raise self._too_few(len(replies))
            time.sleep(self.terms.poll)

    def _too_few(self, found: int) -> NotEnoughClientsError:
        self._save()
        troubles = self._silent | self._refused
        why = "".join(f"; node {node}: {reason}" for node, reason in troubles.items())
        return NotEnoughClientsError(
            f"only {found} of at least {self._needed} clients in {self.terms.wait:g} s; everything "
            f"is saved, go on with resume-from when they are back{why}."
        )

    def _readmit(self) -> Replies:
        """Clients without which no round has gone on: they answer the same request as the rest."""
        progress, parcels = self.progress, {}
        for index, hello in list(self._arrived.items()):
            if index in self.members:
                continue
            owed = progress.owed.get(index)
            if progress.step < 0:
                parcels[index] = self._request(shared=self._start, reset=True)
            elif owed is not None and owed.exchange == progress.exchange and self._sane(hello):
                parcels[index] = self._request(answers=progress.answers)
            else:
                continue
            self._join(hello)
        return self._exchange(parcels)

    def _join(self, hello: Hello) -> None:
        self.members[hello.index] = hello.node
        self._arrived.pop(hello.index)

    def _sane(self, hello: Hello) -> bool:
        """Whether a client's own state is what it should be: neither lost nor from elsewhere."""
        owed = self.progress.owed[hello.index]
        return owed.step <= hello.step and hello.exchange <= self.progress.exchange

    def _admit(self, replies: Replies) -> Replies:
        """Clients that missed a round, or lost their state, go on from where the others are.

        Possible at the beginning of an outer step only. One whose corrections are lost leaves the
        others' with a sum that is not zero: then all corrections begin anew.
        """
        progress = self.progress
        late = [h for index, h in self._arrived.items() if index not in self.members]
        if not late or self._common_step(replies) == progress.step:
            return replies
        paused = self._exchange(
            {index: self._request(answers={}, step=-1, pause=True) for index in replies}
        )
        given = {i: found for i, reply in paused.items() if (found := reply.group("shared"))}
        if not given:
            return {index: replies[index] for index in paused}
        shared = mean_of(list(given.values()), [progress.weights[index] for index in given])
        reset = any(h.index in progress.counted and not self._sane(h) for h in late)
        parcels = {}
        for hello in late:
            owed = progress.owed.get(hello.index)
            if owed is None or hello.index not in progress.counted or reset:
                # It took no part since corrections were zero: its own are zero too.
                parcels[hello.index] = self._request(answers={}, step=-1, shared=shared, reset=True)
            else:
                parcels[hello.index] = self._request(
                    answers=owed.answers, step=owed.step, shared=shared, leave=True
                )
            self._log(f"client {hello.index} goes on from where the others are")
            self._join(hello)
        if reset:
            self._log("a client lost its corrections: those of all clients begin anew at zero")
            progress.counted, progress.owed = set(), {}
            parcels |= {i: self._request(answers={}, step=-1, reset=True) for i in paused}
            return self._exchange(parcels)
        return {index: replies[index] for index in paused} | self._exchange(parcels)

    # What is answered

    def _common_step(self, replies: Replies) -> int:
        steps = {index: int(reply.words.get("step", -1)) for index, reply in replies.items()}
        if len(set(steps.values())) > 1:
            raise ValueError(
                f"the clients are at different outer steps, {steps}: was a folder of states copied "
                "or removed in mid-run? Start anew."
            )
        return next(iter(steps.values()))

    def _take_models(self, replies: Replies) -> None:
        """The mean of the models at each recorded step that the clients have passed."""
        models: dict[int, dict[int, dict[str, np.ndarray]]] = {}
        for index, reply in replies.items():
            for owner in {name.partition(":")[0] for name in reply.arrays}:
                if owner.startswith("model@"):
                    step = int(owner.removeprefix("model@"))
                    models.setdefault(step, {})[index] = reply.group(owner)
        for step, found in sorted(models.items()):
            weights = [self.progress.weights[index] for index in found]
            self._record(step, mean_of(list(found.values()), weights))

    def _answer(self, replies: Replies, step: int) -> None:
        """Combines the questions of one outer step; written down before it is said."""
        progress = self.progress
        asked = {index: reply.group("asked") for index, reply in replies.items()}
        new = combine(asked, progress.weights, progress.clients)
        if not new:
            raise DivergedError(
                f"diverged at outer step {step + 1}: what the clients would have to average is NaN."
            )
        if step != progress.step:
            progress.answers = {}
        progress.step = step
        progress.answers = progress.answers | new
        self._newest = set(new)
        progress.exchange += 1
        progress.rounds += any(not name.startswith("number.") for name in new)
        progress.counted |= set(replies)
        for index in replies:
            progress.owed.pop(index, None)
        self._save()

"""One exchange: requests to clients, and of their replies those that the server can use.

A client whose reply is missing, malformed or at odds with the others is absent from then on, until
it is greeted again. Nothing that it sends ends the run.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from aipod.flower._combine import majority
from aipod.flower._parcel import Parcel
from aipod.flower._progress import Owed, Post, Progress, Terms
from aipod.flower._reply import BadReplyError, Expected, Reply, StrayedError
from aipod.flower._roll import Roll

# What of a client's silences is left after a reply, and the longest rest: so many timeouts, as a
# power of 2.
_FORGIVEN = 0.8
_LONGEST_REST = 10

Replies = dict[int, Reply]
Read = TypeVar("Read")


class Exchanges:
    """Sends requests to the clients of a run and checks what comes back.

    - `absent`: why each client that is absent is so.
    - `strayed`: clients whose state does not fit what the server keeps of them.
    - `diverged`: how often each client has sent numbers that cannot be averaged.
    - `look`: called while replies are awaited, for clients that come back meanwhile.
    """

    def __init__(
        self,
        post: Post,
        terms: Terms,
        progress: Progress,
        roll: Roll,
        expected: Expected,
        look: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self.absent: dict[int, str] = {}
        self.diverged: Counter[int] = Counter()
        self.strayed: set[int] = set()
        self._silences: dict[int, float] = defaultdict(float)
        self._post, self._terms, self._progress = post, terms, progress
        self._roll, self._expected, self._look, self._log = roll, expected, look, log
        for index in progress.counted - set(progress.owed):
            self.owe(index)

    def send(self, parcels: Mapping[int, Parcel]) -> Replies:
        """The good replies that came in time; the other clients are absent from now on."""
        last = max(self._terms.steps, self._progress.step + 1)

        def read(index: int, parcel: Parcel) -> Reply:
            return self._expected.reply(parcel, last, self._progress.known.get(index, {}))

        return self.ask(parcels, read)

    def ask(
        self, parcels: Mapping[int, Parcel], read: Callable[[int, Parcel], Read]
    ) -> dict[int, Read]:
        """The same for any request; `read` raises `BadReplyError` for a bad reply."""
        nodes = {self._roll.members[index]: index for index in parcels}
        timeout = self._terms.round_timeout
        tickets = self._post.send({node: parcels[i] for node, i in nodes.items()}, timeout)
        waiting = {ticket: nodes[node] for node, ticket in tickets.items()}
        for index in set(parcels) - set(waiting.values()):
            self.drop(index, "its node cannot be reached")
        replies: dict[int, Read] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            for ticket, found in self._post.collect(list(waiting)).items():
                index = waiting.pop(ticket)
                try:
                    if isinstance(found, str):
                        raise BadReplyError(found)
                    replies[index] = read(index, found)
                    self._silences[index] *= _FORGIVEN
                except BadReplyError as error:
                    if isinstance(error, StrayedError):
                        self.strayed.add(index)
                    self.drop(index, str(error))
            if waiting and time.monotonic() > deadline:
                for index in waiting.values():
                    self._be_silent(index)
                break
            if waiting:
                self._look()
                time.sleep(self._terms.poll)
        return replies

    def _be_silent(self, index: int) -> None:
        """A client has let everybody wait for nothing; one that does so often is asked less often.

        Else a client that greets and never answers makes every outer step take the whole timeout.
        """
        timeout, node = self._terms.round_timeout, self._roll.members.get(index)
        self.drop(index, f"no reply in {timeout:g} s")
        self._silences[index] += 1
        if node is not None and self._silences[index] > 1:
            seconds = timeout * 2 ** min(self._silences[index], _LONGEST_REST)
            self._roll.rest(node, seconds)
            self._log(f"client {index} is not asked for {seconds:.3g} s, unless it is needed")

    def agreeing(self, replies: Replies) -> Replies:
        """The replies of most clients, which are at one step and ask the same; others are absent.

        Clients of one run ask the same, since what they ask follows from the shared key. Clients
        that have diverged decide only if the others are too few to go on without them.
        """
        last = self._terms.steps
        kinds = {i: (_sound(r, last), r.step, frozenset(r.asked)) for i, r in replies.items()}
        common = majority([kind for kind in kinds.values() if kind[0]], lambda kind: -kind[1])
        if sum(kind == common for kind in kinds.values()) < self._roll.needed:
            common = majority(kinds.values(), lambda kind: (kind[0], -kind[1]))
        for index, kind in kinds.items():
            if common is None or kind == common:
                continue
            sound, step, _ = kind
            if not sound:
                self.diverged[index] += 1
                reason = "its numbers are NaN, infinite or too large to average"
            elif step != common[1]:
                reason = f"it is at outer step {step}, others at {common[1]}"
            else:
                reason = "it asks for other things than the others: has it other versions?"
            self.drop(index, reason)
        return {index: replies[index] for index, kind in kinds.items() if kind == common}

    def say(self, line: str) -> None:
        """One line for the log."""
        self._log(line)

    def drop(self, index: int, reason: str) -> None:
        """The client is absent from now on."""
        self._log(f"client {index} is absent: {reason}")
        self.absent[index] = reason
        self._roll.leave(index)
        self.owe(index)

    def owe(self, index: int) -> None:
        progress = self._progress
        if index not in progress.owed:
            progress.owed[index] = Owed(progress.step, progress.exchange, dict(progress.answers))


def _sound(reply: Reply, last: int) -> bool:
    """Whether a client has not diverged: then its numbers are finite, and it asks for something.

    A client does not ask for the mean of NaN.
    """
    return reply.finite and (len(reply.asked) > 0 or reply.step >= last)

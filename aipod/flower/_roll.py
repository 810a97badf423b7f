"""Who takes part: the server greets nodes, and keeps a list of which client each of them is.

A client says in its greeting which client it is, of how many, and how much it counts. None of that
is taken from a single greeting:

- With nodes in the run's terms an index belongs to the node that stands there. Flower gives a node
  the same id again for the same registered key.
- Otherwise an index belongs to the first node that claims it, as long as that node can be reached,
  and a node that has taken part keeps its index.
- The number of clients is the one in the run's terms, or else the one that most greetings have. It
  is fixed when the run begins.
- Weights are those in the run's terms. Without them a client is refused if its weight is more than
  `Terms.weight_ratio` times the median; a client's weight never changes during a run.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable

from aipod.flower._parcel import Parcel
from aipod.flower._progress import Hello, Post, Progress, Terms
from aipod.flower._reply import BadReplyError, read_greeting

# A node that claims somebody else's index is greeted again after this many looks.
_LOOKS_TO_SKIP = 10


class Roll:
    """The nodes of one run.

    - `members`: the clients that take part now, and the node of each.
    - `keys`: with secure sums, the public keys of clients that take part or did.
    - `arrived`: clients whose greeting was accepted, and that do not take part yet.
    """

    def __init__(
        self, post: Post, terms: Terms, progress: Progress, digest: str, log: Callable[[str], None]
    ) -> None:
        self.members: dict[int, int] = {}
        self.arrived: dict[int, Hello] = {}
        self.keys: dict[int, bytes] = {}
        self._post, self._terms, self._progress = post, terms, progress
        self._digest, self._log = digest, log
        self._greeted: dict[str, tuple[int, float]] = {}
        self._refused: dict[int, str] = {}
        self._silent: dict[int, str] = {}
        self._votes: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._later: dict[int, float] = {}
        self._resting: dict[int, float] = {}
        self._looked = -float("inf")
        self._agree_on_clients()

    def _agree_on_clients(self) -> None:
        terms, progress = self._terms, self._progress
        weights = None if terms.weights is None else dict(enumerate(terms.weights))
        wanted = terms.clients or len(terms.weights or terms.nodes or ())
        if wanted and progress.clients not in (0, wanted):
            raise ValueError(
                f"the run has {progress.clients} clients, but its configuration says {wanted}: "
                "leave that out, or start anew."
            )
        progress.clients = progress.clients or wanted
        if weights is not None:
            progress.weights = weights

    @property
    def needed(self) -> int:
        """With fewer clients a round waits."""
        return self._terms.min_nodes or self._progress.clients or 1

    def look(self, pause: float) -> None:
        """Greets nodes that do not take part, and reads their answers; at most once in a pause."""
        now = time.monotonic()
        if now - self._looked < pause:
            return
        self._looked = now
        timeout = self._terms.round_timeout
        self._greeted = {t: g for t, g in self._greeted.items() if now - g[1] < timeout}
        reachable = list(self._post.nodes())
        for ticket, found in self._post.collect(list(self._greeted)).items():
            node, _ = self._greeted.pop(ticket)
            if isinstance(found, Parcel):
                self._welcome(node, found, reachable, now + _LOOKS_TO_SKIP * pause)
            else:
                # It may be starting, so it is greeted again at the next look.
                self._say_once(node, f"does not answer: {found}")
        busy = {*self.members.values(), *(node for node, _ in self._greeted.values())}
        busy |= {hello.node for hello in self.arrived.values()} | set(self._refused)
        busy |= {node for node, until in self._later.items() if until > now}
        if len(self.members) >= self.needed:
            busy |= {node for node, until in self._resting.items() if until > now}
        strangers = [node for node in reachable if node not in busy]
        hello = Parcel({"action": "hello", "run": self._progress.run, "secure": self._terms.secure})
        tickets = self._post.send(dict.fromkeys(strangers, hello), timeout)
        self._greeted |= {ticket: (node, now) for node, ticket in tickets.items()}

    def _welcome(self, node: int, parcel: Parcel, reachable: list[int], later: float) -> None:
        last = max(self._terms.steps, self._progress.step + 1)
        try:
            hello = read_greeting(node, parcel.words, self._digest, last)
            self._check(hello)
        except BadReplyError as error:
            self._refuse(node, str(error))
            return
        self._votes[node] = hello.clients
        was = [index for index, owner in self._owners.items() if owner == node]
        if was and hello.index not in was:
            self._refuse(node, f"it claims to be client {hello.index}, and was {was[0]} before")
            return
        holder = self._holder(hello.index)
        if holder in (None, node) or holder not in reachable:
            self.arrived[hello.index] = hello
        else:
            self._later[node] = later
            self._say_once(node, f"claims to be client {hello.index}, which node {holder} is")

    def _check(self, hello: Hello) -> None:
        """Raises unless what a client says agrees with what is already fixed."""
        progress, nodes = self._progress, self._terms.nodes
        if self._terms.secure and not hello.key:
            raise BadReplyError("it has no key for secure sums: has it an older aipod?")
        others = [key for index, key in self.keys.items() if index != hello.index]
        others += [one.key for index, one in self.arrived.items() if index != hello.index]
        if hello.key and hello.key in others:
            raise BadReplyError("its key is another client's")
        if nodes is not None and hello.node not in nodes:
            raise BadReplyError("the run configuration's nodes do not name it")
        if nodes is not None and nodes[hello.index : hello.index + 1] != (hello.node,):
            raise BadReplyError(
                f"it claims to be client {hello.index}, and is {nodes.index(hello.node)} in the "
                "run configuration"
            )
        if progress.clients not in (0, hello.clients):
            raise BadReplyError(f"it counts {hello.clients} clients, others {progress.clients}")
        if hello.clients < (self._terms.min_nodes or 1):
            raise BadReplyError(
                f"it counts {hello.clients} clients, but the run needs {self._terms.min_nodes}"
            )
        if progress.weights:
            self._check_weight(hello, list(progress.weights.values()))

    def _check_weight(self, hello: Hello, weights: list[float]) -> None:
        if hello.index in self._progress.weights:
            return  # what it says now does not count
        # The lower of two middle values: one client of two must not set its own measure.
        if hello.weight > self._terms.weight_ratio * statistics.median_low(weights):
            raise BadReplyError(
                f"its weight is {hello.weight:g}, more than {self._terms.weight_ratio:g} times the "
                "median of all clients: give the weights in the run configuration"
            )

    def _holder(self, index: int) -> int | None:
        if index in self.members:
            return self.members[index]
        if index in self.arrived:
            return self.arrived[index].node
        return self._owners.get(index)

    def complete(self, *, late: bool) -> bool:
        """Whether the run can begin; if so, the number of clients and their weights are fixed.

        **Arguments:**

        - `late`: the time for waiting is over, so that as many clients as needed will do.
        """
        clients = self._progress.clients or self._majority(late)
        for hello in list(self.arrived.values()):
            if clients and hello.clients != clients:
                self.turn_out(hello, f"it counts {hello.clients} clients, others {clients}")
        if not clients or (len(self.arrived) < clients and not late):
            return False
        self._progress.clients = clients
        self._fix_weights()
        return len(self.arrived) >= (self.needed if late else clients)

    def _majority(self, late: bool) -> int:
        """The number of clients that most nodes have said; 0 while others may still decide."""
        said = [clients for node, clients in self._votes.items() if node not in self._refused]
        if not said:
            return 0
        votes = Counter(said)
        # In doubt the larger number, with which a run waits rather than begins too early.
        clients = max(votes, key=lambda value: (votes[value], value))
        decided = {*self._votes, *self._refused, *self._silent}
        undecided = sum(node not in decided for node in self._post.nodes())
        return clients if late or 2 * votes[clients] > len(said) + undecided else 0

    def _fix_weights(self) -> None:
        known = self._progress.weights
        weights = {hello.index: hello.weight for hello in self.arrived.values()} | known
        for hello in list(self.arrived.values()):
            try:
                self._check_weight(hello, list(weights.values()))
            except BadReplyError as error:
                self.turn_out(hello, str(error))
        for hello in self.arrived.values():
            known.setdefault(hello.index, hello.weight)

    def turn_out(self, hello: Hello, reason: str) -> None:
        self._refuse(hello.node, reason)
        del self.arrived[hello.index]
        # Whoever claimed the same index may have it.
        self._later.clear()

    def join(self, hello: Hello) -> None:
        self.keys[hello.index] = hello.key
        self.members[hello.index] = self._owners[hello.index] = hello.node
        self.arrived.pop(hello.index)
        self._progress.weights.setdefault(hello.index, hello.weight)

    def bar(self, index: int, reason: str) -> None:
        """The node of a client that takes part is refused from now on."""
        self._refuse(self.members[index], reason)

    def rest(self, node: int, seconds: float) -> None:
        """The node is not greeted for a while, unless the others become too few."""
        self._resting[node] = time.monotonic() + seconds

    def leave(self, index: int) -> None:
        self.members.pop(index, None)
        self.arrived.pop(index, None)

    def troubles(self) -> dict[str, str]:
        """What keeps nodes out."""
        return {f"node {node}": reason for node, reason in (self._silent | self._refused).items()}

    def _refuse(self, node: int, reason: str) -> None:
        self._refused[node] = reason
        self._log(f"node {node} is refused: {reason}")

    def _say_once(self, node: int, words: str) -> None:
        if self._silent.get(node) != words:
            self._silent[node] = words
            self._log(f"node {node} {words}")

"""What the server asks of a client."""

from collections.abc import Mapping

import numpy as np

from aipod.flower._parcel import Parcel, Word
from aipod.flower._progress import Progress, Terms

Arrays = Mapping[str, np.ndarray]


def request(
    terms: Terms,
    progress: Progress,
    answers: Arrays,
    *,
    step: int | None = None,
    shared: Arrays | None = None,
    **flags: bool,
) -> Parcel:
    """Asks a client to go on with some answers.

    **Arguments:**

    - `answers`: by `table.row`.
    - `step`: the outer step that the answers belong to; that of the newest ones by default.
    - `shared`: a state to go on from.
    - `flags`: `leave`, the client took no further part in the step of the answers; `reset`, its
        corrections begin at zero; `pause`, it sends its state in place of beginning a step.
    """
    words: dict[str, Word] = {
        "action": "exchange",
        "run": progress.run,
        "seed": terms.seed,
        "last": terms.steps,
        "every": terms.every,
        "turn": progress.exchange,
        "step": progress.step if step is None else step,
    }
    words |= {name: flags.get(name, False) for name in ("leave", "reset", "pause")}
    words["robust"], words["secure"] = terms.average is not None, terms.secure
    arrays = {f"answer:{name}": value for name, value in answers.items()}
    arrays |= {f"shared:{name}": value for name, value in (shared or {}).items()}
    return Parcel(words, arrays)


def update(terms: Terms, progress: Progress, newest: set[str]) -> Parcel:
    """The newest answers, for a client that has taken part so far."""
    return request(terms, progress, {name: progress.answers[name] for name in sorted(newest)})


def repeated(terms: Terms, progress: Progress) -> Parcel:
    """All answers of the step, for a client that came back before the next ones."""
    return request(terms, progress, progress.answers)


def beginning(terms: Terms, progress: Progress, start: Arrays) -> Parcel:
    """The state from which the run starts."""
    return request(terms, progress, {}, shared=start, reset=True)


def pause(terms: Terms, progress: Progress) -> Parcel:
    """For a client at the beginning of a step: its state, with which others can go on."""
    return request(terms, progress, {}, step=-1, pause=True)


def restart(terms: Terms, progress: Progress, shared: Arrays | None = None) -> Parcel:
    """Corrections of zero; with `shared`, from where the others are."""
    return request(terms, progress, {}, step=-1, shared=shared, reset=True)


def catch_up(terms: Terms, progress: Progress, index: int, shared: Arrays) -> Parcel:
    """For a client that missed a round: it ends its step alone, and goes on with the others."""
    owed = progress.owed[index]
    return request(terms, progress, owed.answers, step=owed.step, shared=shared, leave=True)


def of_sum(terms: Terms, progress: Progress, number: int, phase: str, arrays: Arrays) -> Parcel:
    """One of the three requests of a secure sum."""
    parcel = request(terms, progress, {})
    words = {**parcel.words, "sums": number, "phase": phase}
    return Parcel(words, arrays)

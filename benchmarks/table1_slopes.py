"""Why the measured exponents of BSA and TTSA are smaller than claimed: errors with less noise.

    python benchmarks/table1_slopes.py

Prints the slope of log(error) against log(K) between successive K, with noise in both levels, in
one of them, and in none. docs/table1.md discusses the result.
"""

import dataclasses

import equinox as eqx
import jax
import numpy as np

from aipod.experiments.studies import table1
from aipod.experiments.studies.horizon import sweep

HORIZONS = (300, 1000, 3000, 10_000, 30_000)
NAMES = ("upper_samples", "lower_samples")


def main() -> None:
    noisy, quiet = (table1.setting("none", noise) for noise in (True, False))
    for entrant in (entrant for entrant in table1.ENTRANTS if entrant.name in ("bsa", "ttsa")):
        for words, silenced in (
            ("noise in both levels", ()),
            ("no noise in the upper level", NAMES[:1]),
            ("no noise in the lower level", NAMES[1:]),
            ("no noise", NAMES),
        ):
            problem = noisy.problem
            for name in silenced:
                sampler = getattr(quiet.problem, name)
                problem = eqx.tree_at(lambda p, name=name: getattr(p, name), problem, sampler)
            setting = dataclasses.replace(noisy, problem=problem)
            curve = sweep(entrant.make, setting, HORIZONS, seeds=4, key=jax.random.key(0))
            slopes = np.diff(np.log(curve.error)) / np.diff(np.log(HORIZONS))
            print(f"{entrant.label}, {words}: " + ", ".join(f"{slope:.2f}" for slope in slopes))


if __name__ == "__main__":
    main()

"""Small bilevel problems from many worlds, each with a reference solution from another method.

    from aipod.experiments.gallery import PROBLEMS

    exhibit = PROBLEMS["ridge"]()
    solution = aipod.solve(
        exhibit.problem, aipod.E3AiPOD(), exhibit.x0, exhibit.y0, exhibit.steps, key=key
    )
    exhibit.share(exhibit.value(solution.x))  # 1 where all that is possible was reached

`benchmarks/gallery.py` runs them all with the solvers' defaults, and recomputes the references.
"""

from aipod.experiments.gallery.catalogue import PROBLEMS as PROBLEMS
from aipod.experiments.gallery.catalogue import SETTINGS as SETTINGS
from aipod.experiments.gallery.exhibit import Exhibit as Exhibit
from aipod.experiments.gallery.exhibit import Setting as Setting
from aipod.experiments.gallery.stored import Reference as Reference
from aipod.experiments.gallery.stored import store as store
from aipod.experiments.gallery.units import in_units as in_units

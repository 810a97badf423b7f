"""From a problem and a solver to a solution."""

from aipod.solving._callbacks import Callback as Callback
from aipod.solving._callbacks import CallbackError as CallbackError
from aipod.solving._callbacks import Row as Row
from aipod.solving._checkpoint import CheckpointError as CheckpointError
from aipod.solving._checkpoint import Checkpoints as Checkpoints
from aipod.solving._convergence import Convergence as Convergence
from aipod.solving._convergence import convergence_of as convergence_of
from aipod.solving._history import History as History
from aipod.solving._history import scalar_columns as scalar_columns
from aipod.solving._ledger import PROJECTIONS as PROJECTIONS
from aipod.solving._ledger import RECORDED as RECORDED
from aipod.solving._ledger import Ledger as Ledger
from aipod.solving._ledger import Price as Price
from aipod.solving._progress import Progress as Progress
from aipod.solving._result import Result as Result
from aipod.solving._saved import SavedSolution as SavedSolution
from aipod.solving._saved import load as load
from aipod.solving._solution import DivergedError as DivergedError
from aipod.solving._solution import Solution as Solution
from aipod.solving._solve import solve as solve
from aipod.solving._stop import Stop as Stop

"""The named algorithms, all of them compositions of three slots."""

from aipod.algorithms._alternating import Alternating as Alternating
from aipod.algorithms._e3 import E3AiPOD as E3AiPOD
from aipod.algorithms._federated import FedAvg as FedAvg
from aipod.algorithms._federated import FedNest as FedNest
from aipod.algorithms._federated import LFedNest as LFedNest
from aipod.algorithms._gossip import DSOBA as DSOBA
from aipod.algorithms._gossip import SPARKLE as SPARKLE
from aipod.algorithms._keeping import CLIENTS as CLIENTS
from aipod.algorithms._keeping import Keeping as Keeping
from aipod.algorithms._packed import PackedWatch as PackedWatch
from aipod.algorithms._paper import AiPOD as AiPOD
from aipod.algorithms._paper import E2AiPOD as E2AiPOD
from aipod.algorithms._paper import EAiPOD as EAiPOD
from aipod.algorithms._spread import placed as placed
from aipod.algorithms._spread import placed_state as placed_state
from aipod.algorithms._spread import unplaced_state as unplaced_state
from aipod.algorithms._state import State as State
from aipod.algorithms._table1 import ALSET as ALSET
from aipod.algorithms._table1 import BSA as BSA
from aipod.algorithms._table1 import IGAL as IGAL
from aipod.algorithms._table1 import SOBA as SOBA
from aipod.algorithms._table1 import TTSA as TTSA
from aipod.algorithms._table1 import FirstOrderPenalty as FirstOrderPenalty
from aipod.algorithms._table1 import StocBiO as StocBiO
from aipod.algorithms._watch import natural_way as natural_way

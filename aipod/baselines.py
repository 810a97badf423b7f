"""The other methods of the paper's Table 1, two later ones, and their papers' step sizes."""

from aipod.algorithms._table1 import ALSET as ALSET
from aipod.algorithms._table1 import BSA as BSA
from aipod.algorithms._table1 import IGAL as IGAL
from aipod.algorithms._table1 import SOBA as SOBA
from aipod.algorithms._table1 import TTSA as TTSA
from aipod.algorithms._table1 import FirstOrderPenalty as FirstOrderPenalty
from aipod.algorithms._table1 import StocBiO as StocBiO
from aipod.stepsize._rules import rule as rule

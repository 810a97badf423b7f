"""The other methods of the paper's Table 1, two later ones, and their papers' step sizes."""

from aipod.algorithms import ALSET as ALSET
from aipod.algorithms import BSA as BSA
from aipod.algorithms import FSLA as FSLA
from aipod.algorithms import IGAL as IGAL
from aipod.algorithms import MASOBA as MASOBA
from aipod.algorithms import MRBO as MRBO
from aipod.algorithms import SABA as SABA
from aipod.algorithms import SOBA as SOBA
from aipod.algorithms import SRBA as SRBA
from aipod.algorithms import SUSTAIN as SUSTAIN
from aipod.algorithms import SVRB as SVRB
from aipod.algorithms import TTSA as TTSA
from aipod.algorithms import VRBO as VRBO
from aipod.algorithms import FedBiOAcc as FedBiOAcc
from aipod.algorithms import FedF2SA as FedF2SA
from aipod.algorithms import FedMBO as FedMBO
from aipod.algorithms import FirstOrderPenalty as FirstOrderPenalty
from aipod.algorithms import SimFBO as SimFBO
from aipod.algorithms import StocBiO as StocBiO
from aipod.stepsize import rule as rule

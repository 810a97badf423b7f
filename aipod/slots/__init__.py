"""The three slots of every algorithm, and what they share."""

from aipod.slots._compression import message_bytes as message_bytes
from aipod.slots._cost import Cost as Cost
from aipod.slots._cost import Counts as Counts
from aipod.slots._momentum import restarted_momentum as restarted_momentum
from aipod.slots._turn import Turn as Turn

"""Federations: the same problem with `Consensus` sets, a client axis in front of everything."""

from aipod.federated._federate import average as average
from aipod.federated._federate import federate as federate
from aipod.federated._federate import replicate as replicate
from aipod.federated._partition import IID as IID
from aipod.federated._partition import Dirichlet as Dirichlet
from aipod.federated._partition import Shards as Shards
from aipod.federated._partition import partition as partition
from aipod.federated._partition import split as split

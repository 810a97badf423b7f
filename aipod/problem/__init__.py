"""The problem: two objectives, two sets, two sources of samples, and their derivatives."""

from aipod.problem._averaging import averaged as averaged
from aipod.problem._bilevel import Bilevel as Bilevel
from aipod.problem._client_samplers import ClientBatch as ClientBatch
from aipod.problem._client_samplers import ClientMinibatches as ClientMinibatches
from aipod.problem._composite import AtX as AtX
from aipod.problem._composite import Composite as Composite
from aipod.problem._composite import Objective as Objective
from aipod.problem._composite import client_values as client_values
from aipod.problem._composite import rebuilt as rebuilt
from aipod.problem._derivatives import grad_x_upper as grad_x_upper
from aipod.problem._derivatives import grad_y_upper as grad_y_upper
from aipod.problem._derivatives import hessian_product as hessian_product
from aipod.problem._derivatives import implicit_term as implicit_term
from aipod.problem._noise import Noise as Noise
from aipod.problem._samplers import AbstractSampler as AbstractSampler
from aipod.problem._samplers import Constant as Constant
from aipod.problem._samplers import FullBatch as FullBatch
from aipod.problem._samplers import Minibatches as Minibatches
from aipod.problem._samplers import Sampler as Sampler
from aipod.problem._samplers import batch_size as batch_size
from aipod.problem._samplers import draw as draw
from aipod.problem._samplers import expected as expected
from aipod.problem._samplers import is_random as is_random
from aipod.problem._scope import Scope as Scope
from aipod.problem._spread import spread_batches as spread_batches

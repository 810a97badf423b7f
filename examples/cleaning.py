"""Finds wrong labels among five hundred examples with the help of a hundred clean ones.

Half of the training labels of the digits are wrong. The lower level trains a softmax regression on
weighted examples; the upper level chooses the weights so that it does well on clean examples.
`aipod run cleaning` is the same with figures.
"""

import jax
import numpy as np
import optax

import aipod
from aipod.experiments.tasks import cleaning

options = cleaning.Options(training=500, validation=100, batch_size=100)
data, task = cleaning.mixture(options), cleaning.build(options)
solution = aipod.solve(
    task.problem,
    aipod.AiPOD(upper_optimizer=optax.adam(0.05), lower_steps=10, adjoint_steps=20),
    task.x0,
    task.y0,
    steps=300,
    every=50,
    key=jax.random.key(0),
    record=task.record,
)
history = solution.history
print("step   AUC of found labels   test accuracy")
for step, auc, accuracy in zip(history["step"], history["auc"], history["accuracy"], strict=True):
    print(f"{step:4d} {auc:20.3f} {accuracy:15.3f}")
weights = np.asarray(jax.nn.sigmoid(solution.x))
for kind, chosen in (("right", ~data.wrong), ("wrong", data.wrong)):
    print(f"mean weight of the {chosen.sum()} {kind} labels: {weights[chosen].mean():.2f}")

"""Arguments that `check` cannot work with, and problems that are none."""

import jax
import jax.numpy as jnp
import pytest

import aipod

Y = jnp.ones(3)
PROBLEM = aipod.Bilevel(
    upper=lambda x, y, _: jnp.sum(y**2) + jnp.sum(x**2),
    lower=lambda x, y, _: jnp.sum((x - y) ** 2),
)


@pytest.mark.parametrize("key", [None, 0, "key", jax.random.split(jax.random.key(0))])
def test_a_key_must_be_one_key(key):
    with pytest.raises(ValueError, match=r"key must be one JAX key, as in key=jax.random.key\(0\)"):
        aipod.check(PROBLEM, Y, Y, key=key)


def test_an_old_key_is_a_key():
    old, new = jax.random.PRNGKey(0), jax.random.key(0)
    assert str(aipod.check(PROBLEM, Y, Y, key=old)) == str(aipod.check(PROBLEM, Y, Y, key=new))


@pytest.mark.parametrize("traced", ["x0", "y0", "key", "nothing"])
def test_inside_a_transformation_it_says_so(traced):
    arguments = {"x0": Y, "y0": Y, "key": jax.random.key(0)}

    def inside(value):
        changed = arguments if traced == "nothing" else arguments | {traced: value}
        return aipod.check(PROBLEM, **changed).suggested["lower_lr"]

    with pytest.raises(ValueError, match="inside jit, vmap or grad: call it outside"):
        jax.jit(inside)(arguments.get(traced, Y))


@pytest.mark.parametrize("problem", [None, "problem", aipod.AiPOD(upper_lr=0.1, lower_lr=0.1)])
def test_what_is_no_problem_is_a_finding(problem):
    report = aipod.check(problem, Y, Y, key=jax.random.key(0))
    (found,) = report.findings
    assert (found.name, found.status) == ("problem", "error")
    assert type(problem).__name__ in found.value
    assert found.remedy == "pass an aipod.Bilevel."


@pytest.mark.parametrize("types", [("float32", "float64"), ("float32", "bfloat16")])
def test_mixed_types_are_examined(types):
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum(y["a"].astype(x.dtype) ** 2) + jnp.sum(x**2),
        lower=lambda x, y, _: 0.5 * jnp.sum((y["a"] - x) ** 2) + 0.5 * jnp.sum(y["b"] ** 2),
        lower_set=aipod.Budget(1.0),
    )
    y = {"a": jnp.ones(3, types[0]), "b": jnp.ones(2, types[1])}
    report = aipod.check(problem, jnp.ones(3, jnp.float32), y, key=jax.random.key(0))
    assert report.ok, str(report)

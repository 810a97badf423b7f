"""Callbacks: their order, stopping, what one that raises leaves behind, and what they cost."""

import csv
import sys
import time
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod.solving import _run

KEY = jax.random.key(0)
PROBLEM = aipod.Bilevel(
    upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2),
    lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
)
SOLVER = aipod.AiPOD(upper_lr=0.05, lower_lr=0.5, adjoint_lr=1.0, adjoint_steps=1)


def record(x, y):
    return {"loss": jnp.sum((y - 1.0) ** 2), "both": y[:2]}


def solve(callbacks, steps=100, **options):
    start = jnp.zeros(3)
    options = {"record": record, "every": 5} | options
    return aipod.solve(
        PROBLEM, SOLVER, start, start, steps, key=KEY, callbacks=callbacks, **options
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of one step, so that callbacks see each of them."""
    monkeypatch.setattr(_run, "_CHUNK_SECONDS", 1e-9)


@pytest.mark.usefixtures("small_chunks")
def test_callbacks_see_step_x_y_and_the_newest_row_in_their_order():
    seen, order = [], []

    def look(step, x, y, row):
        order.append("look")
        seen.append((step, x, y, dict(row), row.new.get("step", np.zeros(0)).tolist()))

    found = solve([look, lambda *_: order.append("next")], 12)
    assert order == ["look", "next"] * 12
    assert [step for step, *_ in seen] == list(range(1, 13))
    assert seen[3][3] == {}  # nothing is recorded yet
    assert [row.get("step") for *_, row, _ in seen[4:]] == [5] * 5 + [10] * 2 + [12]
    assert [new for *_, new in seen if new] == [[5], [10], [12]]
    np.testing.assert_array_equal(seen[-1][1], found.x)
    np.testing.assert_array_equal(seen[-1][2], found.y)
    assert float(seen[-1][3]["loss"]) == found.history["loss"][-1]


@pytest.mark.usefixtures("small_chunks")
def test_a_callback_ends_the_run_and_the_others_are_still_called():
    seen = []
    found = solve([lambda step, *_: step >= 7, lambda step, *_: seen.append(step)])
    assert found.result is aipod.Result.stopped
    assert found.result.ok
    assert (int(found.state.step), seen[-1]) == (7, 7)
    found = solve([lambda step, *_: "far enough" if step >= 3 else None])
    assert found.message == "A callback ended the run. It said: far enough. (3 outer steps)"
    # What a function happens to return is no wish to end.
    assert solve([lambda step, *_: step, lambda *_: [1]], 9).result is aipod.Result.completed


def test_callbacks_change_nothing_in_a_run():
    alone, watched = solve([], 300), solve([lambda *_: None], 300)
    np.testing.assert_array_equal(alone.history["loss"], watched.history["loss"])


@pytest.mark.usefixtures("small_chunks")
def test_an_exception_is_named_and_the_state_is_saved(tmp_path):
    called, closed = [], []

    class Logger:
        def __call__(self, step, x, y, row):
            if step == 6:
                raise ConnectionError("the server is gone")

        def close(self):
            closed.append(True)

    callbacks = [lambda step, *_: called.append(step), Logger(), lambda step, *_: called.append(-1)]
    with pytest.raises(
        aipod.CallbackError, match=r"callback 2 \(Logger\) raised ConnectionErr"
    ) as e:
        solve(callbacks, checkpoint=tmp_path)
    assert "the server is gone" in str(e.value)
    assert "after outer step 6" in str(e.value)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert int(e.value.solution.state.step) == 6
    assert called[-2:] == [-1, 6]  # the one before was called, the one behind was not
    assert closed == [True]
    resumed = solve([], checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.x, solve([]).x)


def test_an_error_at_the_end_keeps_the_solution():
    class Logger:
        def __call__(self, *_):
            pass

        def close(self):
            raise OSError("disk full")

    with pytest.raises(aipod.CallbackError, match=r"Logger.*OSError \(disk full\) in close") as e:
        solve([Logger()], 5)
    assert e.value.solution.result is aipod.Result.completed


def test_an_interrupt_in_a_callback_is_an_interrupt():
    def interrupt(*_):
        raise KeyboardInterrupt

    assert solve([interrupt]).result is aipod.Result.interrupted


@pytest.mark.parametrize("callbacks", [print, 3, [3], [lambda step: None]])
def test_what_is_no_callback_is_refused(callbacks):
    with pytest.raises(ValueError, match="callback"):
        solve(callbacks)


# The classes.


def test_csv_is_whole_also_after_a_resumption(tmp_path):
    file = tmp_path / "deep" / "log.csv"
    solve([aipod.callbacks.CSV(file)], 20, checkpoint=tmp_path / "state")
    found = solve([aipod.callbacks.CSV(file)], 40, checkpoint=tmp_path / "state", resume=True)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(5, 41, 5))
    assert [float(row["loss"]) for row in rows] == found.history["loss"].tolist()
    assert "both" not in rows[0]  # an array
    with pytest.raises(ValueError, match="is a folder"):
        aipod.callbacks.CSV(tmp_path)


def test_patience_ends_where_a_metric_no_longer_improves(monkeypatch):
    monkeypatch.setattr(_run, "_CHUNK_SECONDS", 1e-9)
    rising = aipod.callbacks.Patience("loss", 20, better="larger")
    found = solve([rising])
    assert found.result is aipod.Result.stopped
    assert found.history["step"].tolist() == [5, 10, 15, 20, 25]
    assert "loss has not improved for 20 outer steps" in found.message
    # The loss goes on falling, by less than this.
    patient = aipod.callbacks.Patience("loss", 20)
    assert solve([patient]).result is aipod.Result.completed
    assert solve([aipod.callbacks.Patience("loss", 20, least=10.0)]).result.name == "stopped"
    with pytest.raises(aipod.CallbackError, match="'los' is not recorded"):
        solve([aipod.callbacks.Patience("los", 5)])


@pytest.mark.parametrize("options", [{"steps": 0}, {"better": "more"}, {"least": -1.0}])
def test_patience_refuses(options):
    with pytest.raises(ValueError, match="Patience"):
        aipod.callbacks.Patience(**({"metric": "loss", "steps": 5} | options))


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    solve([aipod.callbacks.TensorBoard(tmp_path)], 20)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert content.count(b"loss") == 4
    assert b"both" not in content


def log_of(rows):
    return [(step, values["loss"]) for values, step in rows]


def test_weights_and_biases(monkeypatch, tmp_path):
    """Against its documented interface: init(project=, ...), run.log(data, step=), run.finish()."""
    log, ended, asked = [], [], {}
    run = SimpleNamespace(
        log=lambda data, step: log.append((data, step)), finish=lambda: ended.append(True)
    )

    def init(**options):
        asked.update(options)
        return run

    fake = ModuleType("wandb")
    fake.init, fake.__spec__ = init, object()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    found = solve([aipod.callbacks.WandB("mine", mode="offline")], 20)
    steps, loss = found.history["step"].tolist(), found.history["loss"].tolist()
    assert log_of(log) == list(zip(steps, loss, strict=True))
    assert all(isinstance(value, float | int) for data, _ in log for value in data.values())
    assert (asked, ended) == ({"project": "mine", "mode": "offline"}, [True])


@pytest.mark.parametrize("active", [True, False])
def test_mlflow(monkeypatch, active):
    """Against active_run(), start_run(), log_metrics(metrics, step=) and end_run()."""
    log, calls = [], []
    fake = ModuleType("mlflow")
    fake.__spec__ = object()
    fake.active_run = lambda: object() if active else None
    fake.start_run = lambda **options: calls.append(options)
    fake.log_metrics = lambda metrics, step: log.append((metrics, step))
    fake.end_run = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    found = solve([aipod.callbacks.MLflow(run_name="first")], 20)
    steps, loss = found.history["step"].tolist(), found.history["loss"].tolist()
    assert log_of(log) == list(zip(steps, loss, strict=True))
    assert calls == ([] if active else [{"run_name": "first"}, "end"])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_named_before_the_run(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    make = {"wandb": lambda: aipod.callbacks.WandB("mine"), "mlflow": aipod.callbacks.MLflow}[name]
    with pytest.raises(ImportError, match=f"{name}; to add it"):
        make()


def test_the_calls_cost_nothing():
    """At ten calls a second; what the machinery of one call takes, against a tenth of a second."""
    calls = aipod.solving._callbacks.Callbacks([lambda step, x, y, row: row["loss"]])
    history = aipod.History({name: np.arange(10_000.0) for name in ("step", "loss", "a", "b")})
    calls.begin(history)
    began = time.perf_counter()
    for _ in range(100):
        calls.end_the_run(1, lambda: (0, 0), history)
    assert (time.perf_counter() - began) / 100 < 0.03 * aipod.solving._callbacks.SECONDS

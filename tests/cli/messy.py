"""A folder full of things that the command should refuse, each by its name."""

import gzip
import json
import os
import struct
from pathlib import Path

import numpy as np

from aipod.runs._folder import RunFolder

GOOD = {
    "kind": "run",
    "experiment": "synthetic",
    "solver": "e-aipod",
    "seed": 0,
    "result": "completed",
    "seconds": 1.0,
    "last": {"step": 3},
    "config": {"experiment": "synthetic", "solver": "e-aipod", "seed": 0},
    "metrics": [{"name": "error", "label": "error", "log": True, "better": "smaller"}],
    "axes": ["lower_projections", "step"],
    "environment": {"python": "3.x"},
}
COLUMNS = {
    "step": np.arange(1, 4),
    "lower_projections": np.arange(1, 4),
    "error": np.array([3.0, 2.0, 1.0]),
}
COMPARISON = {
    "kind": "comparison",
    "folders": {"e-aipod": "one"},
    "panels": [{"title": "", "variants": ["e-aipod"]}],
}
CONFIG = 'experiment = "synthetic"\nsteps = 3\n'


def run_folder(path: Path, summary=GOOD, columns=COLUMNS, config: str = CONFIG) -> Path:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(config)
    if columns is not None:
        folder.write_metrics(columns)
    text = summary if isinstance(summary, str) else json.dumps(summary)
    (path / "summary.json").write_text(text)
    return path


def without(name: str) -> dict:
    return {key: value for key, value in GOOD.items() if key != name}


SUMMARIES = {
    "text": '"a run"',
    "list": "[1, 2]",
    "null": "null",
    "deep": "[" * 100_000,
    "digits": '{"kind": ' + "9" * 5000 + "}",
    "no-config": without("config"),
    "no-metrics": without("metrics"),
    "no-seed": without("seed"),
    "no-environment": without("environment"),
    "odd-metrics": GOOD | {"metrics": [1]},
    "odd-axes": GOOD | {"axes": ["../../etc/passwd"]},
    "no-axes": GOOD | {"axes": []},
    "odd-config": GOOD | {"config": [1]},
    "odd-experiment": GOOD | {"experiment": {"a": 1}},
}
COMPARISONS = {
    "no-folders": {"kind": "comparison", "panels": []},
    "no-panels": {"kind": "comparison", "folders": {}},
    "odd-panels": COMPARISON | {"panels": [{"title": 3}]},
    "unknown-variant": COMPARISON | {"panels": [{"title": "", "variants": ["other"]}]},
    "odd-references": COMPARISON | {"references": [3]},
}
# What metrics.csv holds instead of three columns.
METRICS = {
    "other": "step,lower_projections,loss\n1,1,1\n",
    "empty": "",
    "header": "step,lower_projections,error\n",
    "words": "step,lower_projections,error\none,two,three\n",
    "ragged": "step,lower_projections,error\n1,2\n",
    "column": "step\n1\n2\n",
    "binary": "\x00\x01\x02",
}
# The lines of a configuration after its experiment, and what is said of them.
CONFIGS = {
    "steps-text": ('steps = "many"', "steps must be a whole number"),
    "steps-list": ("steps = [1, 2]", "steps must be a whole number"),
    "steps-float": ("steps = 1.5", "steps must be a whole number"),
    "steps-date": ("steps = 1979-05-27", "steps must be a whole number"),
    "steps-nan": ("steps = nan", "steps must be a whole number"),
    "steps-huge": ("steps = 9999999999999", "steps must be at most"),
    "solver-number": ("solver = 3", "there is no solver '3'"),
    "solver-list": ('solver = ["aipod"]', "there is no solver"),
    "x64-text": ('x64 = "maybe"', "x64 must be true or false"),
    "seed-text": ('seed = "zero"', "seed must be a whole number"),
    "prob-list": ("lower_prob = [0.1]", "lower_prob must be a number"),
    "prob-bool": ("lower_prob = true", "lower_prob must be a number"),
    "rank-text": ('lower_rank = "two"', "lower_rank must be a whole number"),
    "coupled-number": ("coupled = 7", "coupled must be true or false"),
    "constraints-list": ('constraints = ["both"]', "constraints must be one of"),
    "optimizer-number": ("upper_optimizer = 3", "upper_optimizer must be an optimiser"),
    "table": ("[lower]\nprob = 1", "without that heading"),
}
COMPARE_CONFIGS = {
    "panel-number": ("panel = 3", "panel must be one or more [[panel]]"),
    "panel-empty": ("panel = []", "panel must be one or more [[panel]]"),
    "panel-list": ("panel = [1]", "each [[panel]] must hold a title and its variants"),
    "panel-variants": ('[[panel]]\ntitle = "a"\nvariants = 3', "variants must name solvers"),
    "solvers-number": ("solvers = 3", "solvers must name solvers"),
    "solvers-empty": ("solvers = []", "solvers must name solvers"),
    "seeds-text": ('seeds = "two"', "seeds must be a whole number"),
}


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + content


def images(path: Path, name: str = "", content: bytes = b"") -> Path:
    """The four files of a small data set, one of them with other content."""
    path.mkdir(parents=True)
    for prefix, count in (("train", 30), ("t10k", 10)):
        pixels = bytes(i % 251 for i in range(count * 16))
        labels = bytes(i % 3 for i in range(count))
        (path / f"{prefix}-images-idx3-ubyte").write_bytes(idx((count, 4, 4), pixels))
        (path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx((count,), labels))
    if name:
        (path / name).write_bytes(content)
    return path


TRAIN = "train-images-idx3-ubyte"
DATA = {
    "no-images": (idx((0, 4, 4), b""), "holds no data"),
    "no-pixels": (idx((30, 0, 0), b""), "holds no data"),
    "huge-header": (idx((2**32 - 1,) * 3, b"\x00" * 100), "truncated or damaged"),
    # 2^64 bytes, which a sum in 64 bits takes for none.
    "wrapping-header": (idx((2**31, 2**31, 4), b""), "truncated or damaged"),
    "bomb": (gzip.compress(idx((30, 4, 4), b"\x00" * 20_000_000)), "truncated or damaged"),
    "huge-bomb": (gzip.compress(idx((2**32 - 1,) * 3, b"\x00" * 10**6)), "truncated or damaged"),
    "broken-gzip": (gzip.compress(idx((30, 4, 4), b"\x07" * 480))[:-9], "does not decompress"),
    "noise": (np.random.default_rng(0).bytes(500), "not an idx file"),
}


def make(place: Path) -> None:
    for name, summary in SUMMARIES.items():
        run_folder(place / f"summary-{name}", summary)
    for name, summary in COMPARISONS.items():
        run_folder(place / f"comparison-{name}", summary, None)
        run_folder(place / f"comparison-{name}" / "runs" / "one" / "seed-0")
    for name, text in METRICS.items():
        (run_folder(place / f"metrics-{name}", columns=None) / "metrics.csv").write_text(text)
    os.mkfifo(run_folder(place / "metrics-pipe", columns=None) / "metrics.csv")
    run_folder(place / "metrics-none", columns=None)
    run_folder(place / "good")
    for name, (line, _) in (CONFIGS | COMPARE_CONFIGS).items():
        text = f'experiment = "synthetic"\n{line}\n'
        (place / f"{name}.toml").write_text(text)
        run_folder(place / f"config-{name}", config=text)
    run_folder(place / "config-binary").joinpath("config.toml").write_bytes(b"\xff\xfe\x00")
    for name, (content, _) in DATA.items():
        images(place / f"data-{name}", TRAIN, content)
    images(place / "data-good")
    (place / "file").write_text("")
    (place / "full").mkdir()
    (place / "full" / "thesis.tex").write_text("")
    (place / "empty").mkdir()

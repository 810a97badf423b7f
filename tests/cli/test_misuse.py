"""Odd lines, odd values and odd files: each gets exit code 2 and one sentence."""

import pytest

from tests.cli import messy
from tests.cli.lines import Answer, answer_all, refused

LONG = "x" * 300
# Bytes in a name that are not text.
RAW = "\udcff"


def run(*words: str) -> list[str]:
    return ["run", "synthetic", "--out", "new", *words]


OPTIMIZER = "must be an optimiser with its step size"
STEP = "must be a number, curvature or curvature(0.5)"
ODD: list[tuple[list[str], str]] = [
    # Values of one option.
    *((run("--set", f"lower_prob={v}"), "lower_prob") for v in ("nan", "inf", "-1", "0", "1e400")),
    *((run("--set", f"lower_prob={v}"), "must be a number") for v in ("[0.1]", "{a=1}", "''")),
    (run("--set", f"lower_prob={'9' * 400}"), "must be a probability"),
    *((run("--lower-lr", v), "lower_lr must be positive") for v in ("nan", "-1", "0", "inf")),
    *((run("--lower-lr", v), STEP) for v in ("curvature(", "curvature(a)", "curvature()()")),
    *((run("--lower-lr", v), STEP) for v in ('curvature(safety="x")', "curvature(cap=[1])")),
    *((run("--lower-lr", v), STEP) for v in ("lambda: 1", "__import__('os')", "1 if 1 else 2")),
    *((run("--lower-lr", v), STEP) for v in ("(" * 5000, "x" * 100_000, "curvature(1e400)")),
    *(
        (run("--upper-optimizer", v), OPTIMIZER)
        for v in ("adam", "adam()", "adam([1])", "magic(1)")
    ),
    *((run("--upper-optimizer", v), OPTIMIZER) for v in ('adam("x")', "adam(nan)", "adam(-1)")),
    *((run("--upper-optimizer", v), OPTIMIZER) for v in ("sgd(None)", "adam(1j)", "adam(True)")),
    *((run("--upper-optimizer", v), OPTIMIZER) for v in ("adam(0.1, foo=1)", "os.system(1)")),
    (run("--upper-optimizer", 'sgd(0.1, momentum="x")'), OPTIMIZER),
    (run("--upper-optimizer", "adam(learning_rate=0.1, learning_rate=1)"), OPTIMIZER),
    *((run("--lower-steps", v), "lower_steps") for v in ("0", "-1", "1.5", "1e30", "nan")),
    (run("--adjoint-steps", "99999999999"), "adjoint_steps must be at most 2147483647"),
    (run("--extrapolation", "0.5"), "extrapolation (delta) must be at least 1"),
    *((run("--dimension", v), "dimension must be") for v in ("0", "-5", "2.5", "nan", "1e30")),
    (run("--problem-seed", "-1"), "problem_seed must be at least 0"),
    *((run("--noise", v), "noise must be 0 or more") for v in ("nan", "-1", "inf")),
    (run("--constraints", "both,upper"), "must be one of both, upper, lower, none"),
    (run("--constraints", ""), "must be one of both, upper, lower, none"),
    *((run("--seed", v), "seed") for v in ("1e3", "99999999999999999999", "-1", "")),
    (run("--steps", "2147483648"), "steps must be at most 2147483647"),
    (run("--every", "0"), "every must be a whole number, at least 1"),
    *((run("--solver", v), "there is no solver") for v in ("", "e-aipod,aipod", "E-AIPOD", LONG)),
    # Names given with --set.
    *((run("--set", v), "is not of the form name=value") for v in ("", "=", "=1", "a=", "a")),
    *((run("--set", v), "there is no option") for v in ("a b=1", "config=1", "out=1", f"{RAW}=1")),
    (run("--set", "experiment=nothing"), "there is no experiment 'nothing'"),
    (run("--set", "steps=1979-05-27"), "steps must be a whole number"),
    (run("--set", "steps=true"), "steps must be a whole number"),
    (run("--set", "x64=1"), "x64 must be true or false"),
    # Files and folders.
    *((run("--config", v), "cannot use") for v in ("", "full", "file/x", LONG)),
    (run("--config", "good/metrics.csv"), "is not valid TOML"),
    (run("--config", "config-binary/config.toml"), "is not a text file in UTF-8"),
    *(
        (["run", "synthetic", "--out", v], "choose another")
        for v in ("file", "file/x", LONG, "y/" * 3000)
    ),
    (["run", "synthetic", "--out", "/proc/nothing/run"], "cannot use /proc/nothing"),
    (["run", "synthetic", "--out", "full"], "files that are not a run's"),
    (["run", "synthetic", "--out", "good"], "already holds a run"),
    (["run", "synthetic", "--resume", "--force", "--out", "good"], "choose one of them"),
    (["run", "synthetic", "--resume", "--out", "full"], "no run to go on with"),
    (["run", "synthetic", "--resume", "--out", "file"], "no run to go on with"),
    (["run", "--resume", "--out", "config-binary"], "is not a text file in UTF-8"),
    (["compare", "--resume", "--out", "config-binary"], "is not a text file in UTF-8"),
    # What a line is about.
    *((["run", v], "there is no experiment") for v in ("", " ", "../synthetic", "table1", "a:b")),
    *((["run", v], "there is no experiment") for v in ("[/]", "[bold]x[/bold]", "💥", RAW, LONG)),
    (["run", "Synthetic"], "Did you mean synthetic?"),
    (["run", "synthetik", "--dimension", "3"], "Did you mean synthetic?"),
    (["run", "--"], "name an experiment"),
    (["run", "synthetic", "synthetic"], "unexpected extra argument"),
    (["run", "synthetic", "--coupled=yes"], "does not take a value"),
    (["run", "synthetic", "--dimension"], "requires an argument"),
    (["run", "synthetic", "--lower-porb", "1"], "there is no option --lower-porb. Did you mean"),
    *((["run", "synthetic", v], "No such option") for v in ("-x", "---", "--data-dir=x")),
    *(([v], "No such option") for v in ("-x", "--nothing", "-5")),
    ([""], "No such command"),
    (["rum"], "No such command 'rum'."),
    (["list", "extra"], "unexpected extra argument"),
    (["federation"], "Missing command"),
    (["federation", "sideways"], "No such command"),
    # Comparisons and measurements.
    *(
        (["compare", "synthetic", "--solvers", v], "must name solvers")
        for v in ("", ",", "aipod,,")
    ),
    *(
        (["compare", "synthetic", "--solvers", v], "name=value")
        for v in ("aipod:", "aipod:=1", ":")
    ),
    (["compare", "synthetic", "--solvers", "aipod:experiment=tolls"], "is no argument of a solver"),
    (["compare", "synthetic", "--solvers", "aipod:dimension=6"], "is no argument of a solver"),
    (["compare", "synthetic", "--solvers", "aipod;e-aipod"], "there is no solver"),
    (["compare", "synthetic", "--solvers", "e-aipod:lower_prob=2"], "must be a probability"),
    *((["compare", "synthetic", "--seeds", v], "seeds must be") for v in ("1001", "-1", "0")),
    (["compare", "synthetic", "--solver", "aipod"], "Did you mean"),
    (["compare"], "name an experiment"),
    (["compare", "table1", "--steps", "5"], "--steps of at least 10000"),
    (["compare", "table1", "--solvers", "nothing"], "there is no 'nothing'"),
    (["compare", "table1", "--seeds", "0"], "--seeds from 1 to 1000"),
    (["compare", "table1", "--seed", "-1"], "seed must be a whole number, at least 0"),
    *((["compare", "table1", v], "compare table1") for v in ("--x64", "--tensorboard", "--resume")),
    (["rates", "--steps", "10"], "--steps must be at least 1000"),
    (["rates", "--steps", "99999999999999999999"], "--steps must be at most"),
    (["rates", "--seeds", "99999999999"], "--seeds must be at most"),
    (["rates", "--seed", "99999999999999999999"], "--seed must be at most"),
    (["rates", "--problems", "nothing"], "there is no 'nothing'"),
    (["rates", "--methods", ""], "there is no ''"),
    (["rates", "--out", "file"], "choose another"),
    # Reports.
    *((["report", v], "no finished run in") for v in ("file", "full", "empty", "/dev/null")),
    *((["report", v], "there is no folder") for v in ("none", RAW)),
    (["report", LONG], "cannot use"),
    (["report", "good", "none"], "there is no folder none"),
    (["report", "good", "--out", "full"], "is a folder"),
    (["report", "good", "--out", "good/config.toml"], "is not a report"),
    *((["report", "good", "--out", v], "cannot use") for v in ("file/x.html", "/proc/x.html")),
    # Checks.
    *((["check", v], "name a module") for v in (":", ":b")),
    *((["check", v], "there is no module") for v in ("a:", "file:x", "a:b:c", f"{RAW}:x")),
    *((["check", v], "raised TypeError") for v in ("json:dumps", "aipod:Bilevel", ".:x")),
    *((["check", v], "must be an aipod.Bilevel") for v in ("os:getcwd", "math:pi")),
    (["check", "sys:exit"], "raised SystemExit"),
    (["check", "os:getcwd", "--set", "a=1"], "it takes no options"),
    (["check", "synthetic", "--set", "foo=1"], "has no option 'foo'"),
    (["check", "synthetic", "--seed", "99999999999999999999"], "--seed must be at most"),
    # Data.
    *(
        (["run", "cleaning", "--data=mnist", "--data-dir", v], "holds no file")
        for v in ("none", RAW)
    ),
    (["run", "cleaning", "--data=mnist", "--data-dir", ""], "data_dir is empty"),
    (["run", "cleaning", "--data=mnist", "--data-dir", LONG], "cannot use"),
    (
        ["run", "cleaning", "--data=mnist", "--data-dir", "data-good", "--validation", "99"],
        "leave some",
    ),
    (["run", "hyper-representation", "--clients", "100000"], "too few for 100000 clients"),
    (["run", "hyper-representation", "--participation", "0"], "participation must lie in (0, 1]"),
    (["run", "loss-tuning", "--imbalance", "2"], "imbalance must lie in (0, 1]"),
    (["run", "transport", "--temperature", "1e-300"], "take a higher temperature"),
    (["run", "tolls", "--spread", "1e300"], "did not come to an equilibrium"),
    (["run", "cleaning", "--corrupted", "1e-12"], "leaves only one kind"),
    # Files of the messy folder.
    *((["report", f"summary-{name}"], "summary.json is damaged") for name in messy.SUMMARIES),
    *((["report", f"comparison-{name}"], "summary.json is damaged") for name in messy.COMPARISONS),
    *((["report", f"metrics-{name}"], "metrics.csv is damaged") for name in messy.METRICS),
    *((["report", f"metrics-{name}"], "has no metrics.csv") for name in ("pipe", "none")),
    *(
        (["run", "--config", f"{name}.toml", "--out", "new"], words)
        for name, (_, words) in messy.CONFIGS.items()
    ),
    *(
        (["run", "--resume", "--out", f"config-{name}"], words)
        for name, (_, words) in messy.CONFIGS.items()
    ),
    *(
        (["compare", "--config", f"{name}.toml", "--out", "new"], words)
        for name, (_, words) in messy.COMPARE_CONFIGS.items()
    ),
    *(
        (["run", "cleaning", "--data=mnist", "--data-dir", f"data-{name}"], words)
        for name, (_, words) in messy.DATA.items()
    ),
]
NAMES = [" ".join(line)[:90].encode("ascii", "replace").decode() for line, _ in ODD]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy")
    messy.make(folder)
    return folder


@pytest.fixture(scope="module")
def answers(place):
    return answer_all([line for line, _ in ODD], place)


@pytest.mark.parametrize("index", range(len(ODD)), ids=NAMES)
def test_an_odd_line_gets_one_sentence(index, answers, place):
    answer: Answer = answers[index]
    refused(answer, ODD[index][1])
    assert not (place / "new").exists()


def test_there_are_enough_of_them():
    assert len(ODD) > 200
    assert len({tuple(line) for line, _ in ODD}) == len(ODD)


def test_nothing_was_written_beside_them(place):
    assert not (place / "runs").exists()
    assert not list(place.rglob("report.html"))

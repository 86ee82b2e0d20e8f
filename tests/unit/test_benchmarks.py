"""The benchmarks' own table, file and goals; the figures are taken by `make bench`, never by a test."""

import json
from contextlib import contextmanager

import pytest
from benchmarks.goals import GOALS
from benchmarks.registry import Benchmark, all_benchmarks, choose
from benchmarks.report import Report, take


def test_every_goal_has_one_benchmark_and_every_figure_a_goal():
    produced = [name for one in all_benchmarks() for name in one.produces]
    assert sorted(produced) == sorted(GOALS)
    named = {goal.bound for goal in GOALS.values() if isinstance(goal.bound, str)}
    assert named <= set(GOALS)


def test_met_missed_and_unmeasurable_are_all_shown_and_only_the_last_fails(tmp_path, capsys):
    def good(directory):
        (directory / "left").touch()
        return {"load_cpu_s": 0.25, "noop_tokens": 7, "render_10k_calls_after_one_edit": 6, "key_hash_mtokens_s": 98.7}

    def broken(directory):
        raise RuntimeError("there is no engine")

    def careless(directory):
        return {"plan_10k_s": 3.0}

    benchmarks = [
        Benchmark(broken, ("hit_share",)),
        Benchmark(good, ("load_cpu_s", "noop_tokens", "render_10k_calls_after_one_edit", "key_hash_mtokens_s")),
        Benchmark(careless, ("plan_10k_s", "plan_10k_rss_mb")),
    ]
    report = take(benchmarks, tmp_path, say=lambda _: None)
    take(benchmarks[1:2], tmp_path, say=lambda _: None)  # finds its directory empty again
    report.show()
    report.write(tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == report.values == good(tmp_path)
    head, *rows = capsys.readouterr().out.splitlines()
    met = {row.split()[0]: row[head.index("met") :].split()[0] for row in rows[:4]}
    assert met == {
        "load_cpu_s": "yes",
        "noop_tokens": "NO",
        "render_10k_calls_after_one_edit": "-",  # what it is held against was not measured
        "key_hash_mtokens_s": "-",
    }
    assert "broken could not be measured: RuntimeError: there is no engine" in rows[4]
    assert "careless could not be measured" in rows[5]
    assert report.exit_code == 1
    assert Report(values={"noop_tokens": 7.0}).exit_code == 0


def test_what_benchmarks_share_is_made_once_and_its_failure_is_theirs(tmp_path):
    made = []

    @contextmanager
    def shared(directory):
        made.append(directory)
        yield len(made)
        raise RuntimeError("it would not end")

    @contextmanager
    def missing(directory):
        raise RuntimeError("there is no engine")
        yield

    def one(ground):
        return {"noop_tokens": ground}

    def two(ground):
        raise ValueError("no answer")

    def three(ground):
        return {"load_cpu_s": 1}

    def four(ground):
        return {"plan_10k_s": 1}

    report = take(
        [
            Benchmark(one, ("noop_tokens",), shared),
            Benchmark(two, ("hit_share",), shared),
            Benchmark(three, ("load_cpu_s",), missing),
            Benchmark(four, ("plan_10k_s",), missing),
        ],
        tmp_path,
        say=lambda _: None,
    )
    assert made == [tmp_path / "shared"]
    assert report.values == {"noop_tokens": 1}
    chapter = __name__.rpartition(".")[2]
    assert report.failures == {
        f"{chapter}.two": "ValueError: no answer",
        "shared": "RuntimeError: it would not end",
        f"{chapter}.three, {chapter}.four": "RuntimeError: there is no engine",
    }
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("pattern", "figures"),
    [
        ("tokens", {"computed_over_unique", "noop_tokens"}),
        ("plan_10k*", {"plan_10k_s", "plan_10k_rss_mb"}),
        ("load_cpu_s", {"load_cpu_s"}),
    ],
)
def test_only_selects_by_chapter_function_or_figure(pattern, figures):
    chosen = choose(all_benchmarks(), [pattern])
    assert len(chosen) == 1
    assert figures <= set(chosen[0].produces)
    assert choose(all_benchmarks(), ["no_such"]) == []

"""Load on a live server, and the statistics of its clients' measurements."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lathe.cli import app
from lathe_base.errors import Code, UserError
from lathe_serving.client import Client
from lathe_serving.client.load import Load, Objective, RequestTimes, run_load, summarize
from tests.support.errors import raises

EASY = Objective(1e3, 1e3)
LATENCIES = ("first_token", "per_output_token", "between_tokens", "end_to_end")


def test_figures_of_known_requests() -> None:
    requests = [
        RequestTimes(0.0, (1.0, 1.5, 1.5, 1.5, 3.0)),  # the tokens of a character arrive together
        RequestTimes(1.0, (1.5, 3.5)),
        RequestTimes(1.0, (1.25,)),
        RequestTimes(2.0, (), "the server is busy"),
    ]
    summary = summarize(requests, Objective(1.0, 0.5))
    assert (summary.seconds, summary.requests, summary.failed) == (3.5, 4, 1)
    assert summary.tokens_per_second == pytest.approx(8 / 3.5)
    assert summary.goodput == pytest.approx(2 / 3.5)  # the second waits 2 s for a token
    figures = {name: summary.to_json()[name] for name in LATENCIES}
    means = {name: statistics["mean"] for name, statistics in figures.items()}
    medians = {name: statistics["p50"] for name, statistics in figures.items()}
    # As vLLM's benchmark_serving computes them from the arrivals of the chunks.
    assert means == pytest.approx(
        dict(zip(LATENCIES, (1.75 / 3, 1.25, 4 / 3, 5.75 / 3), strict=True))
    )
    assert medians == pytest.approx(dict(zip(LATENCIES, (0.5, 1.25, 1.5, 2.5), strict=True)))
    with raises(Code.SERVER_ERROR, "1 requests", "busy"):
        summarize(requests[3:], EASY)


@pytest.mark.parametrize("rate", [None, 40.0])
def test_every_request_gets_its_tokens(either: Client, rate: float | None) -> None:
    load = Load(["a", "hello"], [3, 9, 5], requests=12, clients=4, rate=rate)
    requests = run_load(either, load)
    assert sorted(len(request.tokens) for request in requests) == [3] * 4 + [5] * 4 + [9] * 4
    assert all(list(r.tokens) == sorted(r.tokens) and r.tokens[0] >= r.sent for r in requests)
    summary = summarize(requests, EASY)
    assert summary.failed == 0
    assert summary.goodput == pytest.approx(summary.requests_per_second)


def test_the_command(url: str, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "load"
    prompts.write_text("one\n\ntwo\n")
    options = ["--url", url, "--prompts", str(prompts), "--output", str(output)]
    arguments = ["bench-serve", "--requests", "6", "--clients", "2", "--tokens", "2:4", *options]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    figures = json.loads((output / "load.json").read_text())
    assert figures["summary"]["failed"] == 0 and len(figures["requests"]) == 6
    page = (output / "load.html").read_text()
    assert "2 clients, 6 requests of 2 to 4 new tokens" in page and "data:image/svg+xml" in page


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--tokens", "5:2"], Code.INVALID_VALUE, "5:2"),
        (["--prompts", "absent.txt"], Code.NOT_FOUND, "absent.txt"),
        (["--url", "127.0.0.1:1"], Code.UNREACHABLE, " 127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1/v1"], Code.UNREACHABLE, "http://127.0.0.1:1/v1"),
    ],
)
def test_mistakes(options: list[str], code: Code, text: str, tmp_path: Path) -> None:
    arguments = ["bench-serve", "--url", "127.0.0.1:1", *options, "--output", str(tmp_path / "o")]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UserError) and error.code is code and text in str(error)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "option", ["--rate=nan", "--rate=0", "--rate=-1", "--first-token=inf", "--between-tokens=nan"]
)
def test_a_load_that_makes_no_sense_is_refused_before_any_request(option: str) -> None:
    result = CliRunner().invoke(app, ["bench-serve", option, "--url", "localhost:1"])
    assert isinstance(result.exception, UserError)
    assert result.exception.what.startswith(option.split("=")[0])

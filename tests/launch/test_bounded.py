"""Asking other programs: what happens to those that never answer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from launch.host import bounded


def test_at_once_ends_what_runs_and_whatever_is_started_meanwhile():
    hangs = ["sleep", "100"]
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(bounded.ask, hangs, 100)
        while not bounded._live:
            time.sleep(0.01)
        with bounded.at_once():
            later = pool.submit(bounded.ask, hangs, 100)
            assert begun.result(30).code == later.result(30).code == -9


def test_after_at_once_programs_are_waited_for_again():
    with bounded.at_once():
        pass
    assert bounded.ask(["sh", "-c", "sleep 0.1; echo here"], 30).out == "here\n"


def test_why_there_is_no_answer_is_the_first_exception_that_is_an_errors():
    """What a program says of errors before what it says besides; without an exception its first line."""
    for out, err, told in (
        ("ValueError: logged\n", "Traceback:\n  here\nRuntimeError: no GPU\nOSError: later", "RuntimeError: no GPU"),
        ("ValueError: logged", "one\ntwo", "ValueError: logged"), ("said", " \none\ntwo", "one"), ("said\nmore", "", "said"),
    ):  # fmt: skip
        assert bounded.Answer(3, out, err).failure == f"exit code 3, {told}"
        assert bounded.Answer(None, out, err, why="too slow").failure == f"too slow, {told}"
    assert bounded.Answer(3).failure == "exit code 3"


def test_a_thread_that_starts_its_program_late_ends_too(monkeypatch):
    """The moment between a program's start and its being known: the end may come then, and must not be missed."""
    started, go = threading.Event(), threading.Event()
    popen = bounded.subprocess.Popen

    def slow(*args, **named):
        process = popen(*args, **named)
        started.set()
        go.wait(1200)
        return process

    monkeypatch.setattr(bounded.subprocess, "Popen", slow)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(bounded.ask, ["sleep", "100"], 100)
        assert started.wait(1200)
        with bounded.at_once():
            go.set()
            assert answer.result(30).code == -9

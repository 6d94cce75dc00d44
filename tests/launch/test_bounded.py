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

"""A host's own name: given once, refused when another host answers to it, and in receipts and comparisons from then on."""

import pytest

from launch.host import host_id
from nam_megatron.errors import Refused

ONE, TWO = {"gpus": "1" * 16, "host": "a", "salt": "s"}, {"gpus": "2" * 16, "host": "b", "salt": "s"}


def refusal(*words) -> str:
    with pytest.raises(Refused) as refused:
        host_id.named(*words)
    (problem,) = refused.value.problems
    assert problem.key == "host"
    return problem.message


def test_a_host_gets_a_name_once_and_keeps_it(tmp_path):
    assert host_id.named(tmp_path, ONE, None) is None
    assert host_id.named(tmp_path, ONE, "alpha") == "alpha"
    assert host_id.named(tmp_path, ONE, None) == host_id.named(tmp_path, ONE, "alpha") == "alpha"
    assert host_id.named(tmp_path, ONE | {"host": "renamed"}, None) == "alpha"  # its GPUs are the host
    assert host_id.named(tmp_path, TWO, None) is None


def test_another_host_may_not_answer_to_it(tmp_path):
    host_id.named(tmp_path, ONE, "alpha")
    assert refusal(tmp_path, TWO, "alpha") == "another host is called `alpha`"
    assert refusal(tmp_path, ONE, "beta") == "this host is called `alpha`"
    assert host_id.named(tmp_path, TWO, "beta") == "beta"
    assert host_id.hosts(tmp_path) == {"alpha": ONE["gpus"], "beta": TWO["gpus"]}


@pytest.mark.parametrize("name", ["", "a b", "../a", "-a", "x" * 41])
def test_what_is_no_name(tmp_path, name):
    assert "is no name of a host" in refusal(tmp_path, ONE, name)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "[" * 9999])
def test_a_damaged_table_is_said(tmp_path, text):
    (tmp_path / host_id.HOSTS).write_text(text)
    assert "cannot be read" in refusal(tmp_path, ONE, None)


def test_a_comparison_calls_hosts_by_their_names():
    named = {"box": ONE | {"name": "alpha"}}
    assert [host_id.called(found) for found in (named, {"box": TWO}, {})] == ["alpha", TWO["gpus"], "unknown"]

"""Receipts side by side: what may be compared, what differs, and the list of them."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import __main__ as command
from launch.record import compare, receipt, receipts
from launch.record.redact import Redactor
from launch.run.overlay import CACHES
from nam_megatron.errors import Refused

LINEAGE = {"host": "h200_8", "pool": None, "family": "nam56r", "regime": "native_dp; 1 x 8 GPUs"}
BOX = {"gpus": "0123456789abcdef", "host": "aa", "salt": "bb"}
RECIPE = {
    "preset": {"name": "a", "family": "nam56r"},
    "model": {"depth": 52, "letters": {"A": "attention"}, "substitute": []},
    "schedule": {"micro_batch_size": 4, "log_interval": 1},
    "cluster": {"waivers": {}, "nodes": 1},
}
OUTCOME = {
    "figures": {"window": {"median_ms": 2567.0, "tokens_per_s_per_gpu": 25500.0}, "steps": 20},
    "nan_check": True,
}


H200 = {
    "name": "NVIDIA H200", "bus": "00000000:00:06.0", "memory_mib": 143771.0, "ecc": True, "max_sm_mhz": 1980.0,
    "power_limit_w": 700.0, "pcie": [5.0, 16.0],
}  # fmt: skip


def made(run="one", end="completed", lineage=LINEAGE, **more):
    content = {
        "schema": receipt.SCHEMA, "run": run, "state": "open", "lineage": lineage, "box": BOX, "recipe": copy.deepcopy(RECIPE), **more,
    }  # fmt: skip
    return receipt.sealed(content, end, OUTCOME) if end else content


def test_equal_runs_have_no_differences():
    text = compare.table([made("one"), made("two")])
    assert "== changes the computation: none ==" in text and "== execution only: none ==" in text
    assert "median ms" in text and text.count("2567") == 2
    assert "RUMOR" not in text and "note:" not in text


def test_a_hidden_word_is_explained():
    hidden = {"recipe": RECIPE | {"preset": {"name": "<text>"}}}
    assert "note: `<text>` is a word of your own" in compare.table([made("one"), made("two", **hidden)])


def test_other_data_at_the_same_path_is_another_computation():
    def of(run, **more):
        return made(run, recipe=RECIPE | {"data": {"name": "built", "path": "/set"}}, **more)

    def data(content):
        return {"data": {"name": "built", "files": {"train.bin": {"sha256": content}}}}

    assert "changes the computation: none" in compare.table([of("one", **data("aa")), of("two", **data("aa"))])
    rows = dict(compare.differences([of("one", **data("aa")), of("two", **data("bb"))]))
    assert rows["changes the computation"] == [("data.files.train.bin.sha256", ["aa", "bb"])]
    text = compare.table([of("one"), of("two", **data("bb")), of("three")])  # two of an older launcher
    assert "note: whether the data is the same cannot be told: `one` and `three` did not record it" in text
    assert "changes the computation: none" in text
    assert "note:" not in compare.table([made("one"), made("two", **data("bb"))])  # random tokens have no hashes


def test_another_beginning_at_the_same_path_is_another_computation():
    """Two imports written to one folder, one after the other, and a run from random weights."""
    runs = [made(name) for name in ("one", "two", "three")]
    for run, loaded in zip(runs, ("a" * 64, "b" * 64, None), strict=True):
        run["outcome"] = run["outcome"] | {"loaded": loaded and {"step": 0, "sha256": loaded}}
        assert Redactor({}).tree(run["outcome"]) == run["outcome"]
    for pair in (runs[:2], runs[1:]):
        assert "outcome.loaded.sha256" in dict(dict(compare.differences(pair))["changes the computation"])


def test_what_an_older_receipt_does_not_have_is_no_difference():
    """None is an answer there, too: random weights, and no code at Python's start."""
    recipe = RECIPE | {"schedule": RECIPE["schedule"] | {"load": "/ckpt"}}
    old, new = (made(run, recipe=recipe, host={"versions": {"python": "3.12"}}) for run in ("one", "two"))
    new["outcome"] = new["outcome"] | {"loaded": {"step": 0, "sha256": "a" * 64}}
    new["host"] = {"versions": {"python": "3.12", "startup": "0123456789abcdef"}}
    text = compare.table([old, new])
    assert "changes the computation: none" in text and "execution only: none" in text
    for what in ("they began with the same checkpoint", "Python ran the same code at its start"):
        assert f"note: whether {what} cannot be told: `one` did not record it" in text
    none = copy.deepcopy(new) | {"run": "three"}
    none["outcome"]["loaded"]["sha256"] = none["host"]["versions"]["startup"] = None
    rows = dict(dict(compare.differences([new, none]))["changes the computation"])
    assert rows.keys() == {"outcome.loaded.sha256", "host.versions.startup"} and "note:" not in compare.table(
        [new, none]
    )


@pytest.mark.parametrize("key", ["host", "family", "regime"])
def test_another_lineage_is_refused_by_its_name_and_a_rumor_with_anyway(key):
    pair = [made("one"), made("two", lineage=LINEAGE | {key: "else"})]
    with pytest.raises(Refused) as refused:
        compare.table(pair)
    said = {"regime": "`native_dp; 1 x 8 GPUs` and `else`"}.get(key, f"`{LINEAGE[key]}` and `else`")
    assert [p.message for p in refused.value.problems] == [f"{compare.LINEAGE[key]} differs: {said}"]
    with pytest.raises(Refused) as refused:
        compare.table([*pair, made("three", lineage={name: "else" for name in LINEAGE})])
    assert refused.value.render().count("--anyway") == 1
    text = compare.table(pair, anyway=True)
    assert text.startswith("RUMOR: these runs are not comparable\n") and "== figures (RUMOR) ==" in text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NCCL_NVLS_ENABLE", ("0", None)),
        ("CUDA_LAUNCH_BLOCKING", ("1", None)),
        ("NVTE_FUSED_ATTN", ("0", "1")),
        ("LD_LIBRARY_PATH", ("/opt/a", "/opt/b")),
        ("PYTHONOPTIMIZE", ("1", None)),
        ("ENABLE_PERSISTENT_TMA_MATMUL", ("1", None)),
        ("CUDA_DEVICE_MAX_CONNECTIONS", ("8", None)),
    ],
)
def test_another_environment_of_the_training_processes_is_another_regime(name, values):
    redactor = Redactor({}, salt="s")
    pair = [
        made(run, environ=redactor.environ({"OMP_NUM_THREADS": "1"} | ({name: v} if v else {})))
        for run, v in zip(("one", "two"), values, strict=True)
    ]
    with pytest.raises(Refused) as refused:
        compare.table(pair)
    (problem,) = refused.value.problems
    assert name in problem.message
    assert f"environ.{name}" in compare.table(pair, anyway=True)


def test_unlike_values_never_read_alike():
    """Long lists, and texts that part behind what a column shows."""
    gpus = [{"bus": f"0{n}", "vbios": "96.00.A5.00.01", "name": "NVIDIA H200"} for n in range(8)]
    other = [*gpus[:7], gpus[7] | {"vbios": "97"}]
    rows = dict(compare.differences([made("one", host={"gpus": gpus}), made("two", host={"gpus": other})]))
    assert rows["execution only"] == [("host.gpus.7.vbios", ["96.00.A5.00.01", "97"])]
    long = "x" * 80
    assert compare.apart([long + "a", long + "b"]) == ["...xxxxxxxxa", "...xxxxxxxxb"]
    assert len(set(compare.apart([long + "a" * 70 + "b", long + "a" * 70 + "c", long + "q"]))) == 3
    assert len(set(compare.apart([1.00000001, 1.00000002]))) == len(set(compare.apart(["1", 1]))) == 2


def test_a_long_regime_is_parted_by_what_differs_and_nothing_of_it_is_lost():
    one = "native_dp; 1 x 8 GPUs; fp8 none; moe dispatcher=local grouped_gemm expert_gemm=quack; params=bf16; mla kernels=fused; adamw"
    two = "native_dp; 1 x 4 GPUs; fp8 format=hybrid; moe dispatcher=local grouped_gemm expert_gemm=torch; params=bf16 x=1; adamw; bridge"
    assert list(compare.parted([one, two])) == [
        ["fp8 none", "fp8 format=hybrid"],
        ["moe expert_gemm=quack", "moe expert_gemm=torch"],
        ["nothing more", "x=1"],
        ["1 x 8 GPUs; mla kernels=fused", "1 x 4 GPUs; bridge"],
    ]
    long = {"one": "a" * 150 + "b", "two": "a" * 150 + "c", "three": "d"}  # no cut of one length tells all three apart
    text = compare.table([made(name, patches={"x": value}) for name, value in long.items()])
    assert max(map(len, text.splitlines())) < 250 and all(f"a{end}" in text for end in "bc")


def test_figures_have_a_column_of_their_difference():
    slow = made("two")
    slow["outcome"] = {
        "end": "completed",
        "figures": {"window": {"median_ms": 2695.35}, "steps": 20},
        "nan_check": True,
    }
    rows = {line.split("  ")[0]: line for line in compare.table([made("one"), slow]).splitlines()}
    assert rows["median ms"].split()[-2:] == ["+4.99", "%"] or rows["median ms"].split()[-2:] == ["+5.00", "%"]
    assert not rows["steps"].endswith("%") and "difference" in compare.table([made("one"), slow])
    three = compare.table([made("one"), slow, made("three")])
    assert "2 to 1" in three and "3 to 1" in three


def test_another_peak_is_another_utilisation():
    pair = [made(run, forecast={"peak_tflops": peak}) for run, peak in (("one", 989.0), ("two", 500.0))]
    with pytest.raises(Refused, match="MFU is measured by different peaks: `989` and `500` TFLOP/s"):
        compare.table(pair)


def test_marks_of_two_folders_say_nothing_of_each_other():
    """LD_PRELOAD of another library stood beside none, and both were `<set>`."""

    def pair(**environ):
        return [
            made(run, lineage=LINEAGE | {"pool": "p"}, box=BOX | {"salt": salt}, host={"gpus": [H200], "driver": "580"},
                 environ=Redactor({}, salt=salt).environ({"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": f"/x/{salt}", **environ}))
            for run, salt in (("one", "a"), ("two", "b"))
        ]  # fmt: skip

    assert refusals(*pair()) == []
    known = pair(NCCL_IB_PKEY="1")
    assert refusals(*known) == []
    assert refusals(known[0], pair(NCCL_IB_PKEY="2")[1])[0].endswith("had NCCL_IB_PKEY `1` and `2`")
    assert refusals(*pair(NCCL_MY_KEY="1")) == [
        "whether the training processes had the same `NCCL_MY_KEY` cannot be told"
    ]
    assert refusals(*pair(LD_PRELOAD="/opt/a.so")) == [
        "whether the training processes had the same `LD_PRELOAD` cannot be told"
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": "NVIDIA H100 80GB HBM3"}, "name"),
        ({"memory_mib": 81559.0}, "memory"),
        ({"power_limit_w": 500.0}, "power limit"),
        ({"power_limit_w": None}, "power limit"),
        ({"max_sm_mhz": 1755.0}, "highest clock"),
        ({"ecc": False}, "ECC"),
        ({"pcie": [4.0, 16.0]}, "PCIe"),
    ],
)
@pytest.mark.parametrize("pool", ["rack7", None])
def test_other_gpus_are_refused_in_a_pool_and_on_one_host(pool, change, what):
    def of(run, gpu, driver="580"):
        return made(run, lineage=LINEAGE | {"pool": pool}, host={"gpus": [gpu] * 8, "driver": driver})

    assert refusals(of("one", H200), of("two", {**H200, "bus": "00000000:00:07.0"})) == []
    (said,) = refusals(of("one", H200), of("two", H200 | change))
    assert said.startswith(f"the GPUs' {what} differs: ")
    assert refusals(of("one", H200), of("two", H200, "590")) == ["the GPUs' driver differs: `580` and `590`"]


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        ({"nccl": {"version": "2.28.9", "network": "IB"}}, "network"),
        ({"nccl": {"version": "2.27.3", "network": "Socket"}}, "NCCL"),
        ({"nccl": None}, "NCCL"),
        ({"ranks": [{"name": "NVIDIA H200"}, {"name": "NVIDIA B200"}]}, "name on the ranks"),
        ({"ranks": [{"name": "NVIDIA H200", "expandable": True}]}, "growing segments"),
    ],
)
def test_what_ranks_and_nccl_found_is_held_against_a_run(outcome, what):
    """InfiniBand was compared with sockets; of a second host nothing but its ranks says which GPUs it had."""
    plain = {"ranks": [{"name": "NVIDIA H200"}] * 2, "nccl": {"version": "2.28.9", "network": "Socket"}}
    one, two = ({**made(run), "outcome": OUTCOME | {"end": "completed"} | plain} for run in ("one", "two"))
    assert refusals(one, two) == []
    said = refusals(one, {**two, "outcome": two["outcome"] | outcome})
    assert any(text.startswith(f"the GPUs' {what} differs: ") for text in said)


def test_a_diagnostic_run_is_not_compared_with_one_that_is_none():
    one, two = made("one"), made("two", job={"diagnostic": "half the links are down"})
    assert refusals(one, two) == ["a diagnostic beside what is none: `-` and `half the links are down`"]
    assert refusals(two, {**two, "run": "three"}) == []


def test_what_was_waived_stands_beside_the_figures():
    idle = [{"name": "idle", "level": "waived", "message": "..."}, {"name": "torch", "level": "ok", "message": "..."}]
    rows = dict(compare.figures([made("one"), made("two", findings=idle)]))
    assert rows["waived in the checks"] == ["-", "idle", ""]


@pytest.mark.parametrize("name", [*CACHES, "NVIDIA_VISIBLE_DEVICES"])
def test_where_a_host_keeps_things_is_no_regime(name):
    pair = [made(run, environ=Redactor({}).environ({name: f"/x/{run}"})) for run in ("one", "two")]
    assert compare.table(pair)


def test_all_objections_come_at_once():
    pair = [made("one", end=None), made("two", lineage={"host": "x", "family": None, "regime": LINEAGE["regime"]})]
    with pytest.raises(Refused) as refused:
        compare.table(pair)
    assert [p.message for p in refused.value.problems] == [
        "`one` is not sealed", "host lineage differs: `h200_8` and `x`", "preset family is not named in `two`",
    ]  # fmt: skip


# What may differ in a receipt, and whether it is of what was computed; None: it stands beside, or is a figure.
DIFFERS = {
    "recipe.model.depth": True, "recipe.model.letters.A": True, "recipe.schedule.log_interval": False, "recipe.preset.name": False,
    "recipe.cluster.waivers.git": False, "data.files.train": True, "source.trees.nam_megatron": True, "source.trees.launch": False,
    "patches.megatron-core 0_19_2.state": True, "mends.stage": True, "outcome.mends.stage": True, "outcome.loaded.sha256": True,
    "host.driver": False, "host.versions.torch": True, "host.torch.cuda": True, "host.megatron.path": True, "job.packages.numpy": True,
    "job.overlay.OMP_NUM_THREADS": False, "job.diagnostic": False, "environ.NCCL_ALGO": False,
    "job.tokens_per_step": None, "forecast.peak_tflops": None, "outcome.reason": None, "lineage.pool": None,
}  # fmt: skip


@pytest.mark.parametrize(("key", "computes"), DIFFERS.items())
def test_differences_are_split_by_what_they_change(key, computes):
    pair = [made("one"), made("two")]
    for value, run in enumerate(pair):
        *above, last = key.split(".")
        at = run
        for name in above:
            at[name] = dict(at.get(name) or {})
            at = at[name]
        at[last] = value
    told = [[(key, cells) for key, cells in rows] for _, rows in compare.differences(pair)]
    assert told == [[(key, ["0", "1"])] if computes is of else [] for of in (True, False)]


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["recipe", "host", "job", "outcome", "patches", "forecast"]), TREES),
        min_size=2,
        max_size=3,
    )
)
def test_no_receipt_is_a_traceback(contents):
    receipts_ = [
        {**receipt.plain(c), "run": f"r{i}", "state": "sealed", "lineage": LINEAGE} for i, c in enumerate(contents)
    ]
    assert "==" in compare.table(receipts_, anyway=True)


def refusals(*receipts_) -> list[str]:
    return [p.message for p in compare.objections(receipts_)]


def test_one_box_or_one_pool_is_compared_and_nothing_else():
    """Three hosts behind one cluster name took 988, 1,205 and 1,414 ms, and were compared."""
    one, two = made("one"), made("two", box={"gpus": "f" * 16, "host": "aa", "salt": "bb"})
    assert refusals(one, made("two", box=BOX | {"host": "cc"})) == []  # a container's name changes, its GPUs do not
    assert refusals(one, two) == ["2 hosts: `0123456789abcdef` and `ffffffffffffffff`"]
    pooled = [made(name, box={"gpus": name}, lineage=LINEAGE | {"pool": "rack7"}) for name in ("a", "b", "c")]
    assert refusals(*pooled) == ["the GPUs of `a`, `b` and `c` are not recorded"]
    pooled = [{**one, "host": {"gpus": [H200]}} for one in pooled]
    assert refusals(*pooled) == []
    assert refusals(pooled[0], {**one, "host": pooled[0]["host"]}) == ["2 hosts: `a` and `0123456789abcdef`"]
    older = made("older", schema=receipt.FIRST, box=None)
    assert refusals(one, older) == ["no host is recorded in `older`"]
    assert "RUMOR" in compare.table([one, older], anyway=True)


def test_a_host_without_gpus_is_known_by_its_salted_name_within_one_folder():
    def of(host, salt):
        return made(host + salt, box={"gpus": None, "host": host, "salt": salt})

    assert refusals(of("a", "x"), {**of("a", "x"), "run": "other"}) == []
    assert len(refusals(of("a", "x"), of("a", "y"))) == 1


def test_several_nodes_are_known_by_their_ranks_gpus():
    def of(run, *gpus, said=2):
        content = made(run, job={"nodes": 2, "world": 2})
        content["outcome"] = {**content["outcome"], "ranks": [{"uuid": g} for g in gpus[:said]]}
        return content

    assert refusals(of("a", "g1", "g2"), of("b", "g2", "g1")) == []
    assert refusals(of("a", "g1", "g2"), of("b", "g1", "g3"))[0].startswith("2 hosts: ")
    assert refusals(of("a", "g1", "g2"), of("b", "g1", "g2", said=1)) == ["no host is recorded in `b`"]


ODD = {
    "other data": dict(recipe=RECIPE | {"data": {"name": "built", "path": "/b"}}), "an older launcher": dict(box=None),
    "another host": dict(box=BOX | {"gpus": "f" * 16}), "of a pool": dict(lineage=LINEAGE | {"pool": "rack7"}, box={"gpus": "f" * 16}),
    "other GPUs": dict(host={"gpus": [H200 | {"ecc": False}]}), "no GPUs": dict(host={}), "another driver": dict(host={"driver": "590"}),
    "a diagnostic": dict(job={"diagnostic": "half"}), "a variable": dict(environ={"NCCL_ALGO": "Ring"}),
    "another peak": dict(forecast={"peak_tflops": 1.0}), "another count": dict(forecast={"model_flops_per_token": 1.0}),
    "open": dict(end=None),
    "lost": dict(end="lost"), **{f"another {key}": dict(lineage=LINEAGE | {key: "x"}) for key in ("host", "family", "regime")},
    **{f"{key} {none}": dict(lineage=LINEAGE | {key: none}) for key in ("host", "family", "regime") for none in (None, "")},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_among_three_is_found_wherever_it_is_named(odd):
    usual = dict(host={"gpus": [H200], "driver": "580"}, environ={"OMP_NUM_THREADS": "1"})
    found = set()
    for place in range(3):
        three = [made(f"run{i}", **usual | (odd if i == place else {})) for i in range(3)]
        found.add(
            (
                len([*compare.objections(three)]),
                frozenset(key for _, rows in compare.differences(three) for key, _ in rows),
            )
        )
    ((objections, keys),) = found
    assert objections or keys


def test_a_run_is_not_compared_with_itself_nor_a_lost_one_at_all():
    assert refusals(made("one"), made("one")) == ["`one` is compared with itself"]
    assert refusals(made("one"), made("two", end="lost")) == ["`two` lost its launcher"]


def test_the_commands(tmp_path, capsys, monkeypatch):
    root = tmp_path / "receipts"
    runs = []
    for preset, end in (("a", "completed"), ("b", "failed")):
        opened = receipt.open_receipt(
            root, preset, {"lineage": LINEAGE, "box": BOX, "recipe": {"preset": {"name": preset}}}, Redactor({})
        )
        opened.seal(end, OUTCOME)
        runs.append(opened.folder)
    (root / "broken").mkdir()
    (root / "broken" / receipt.FILE).write_text("{}")
    assert receipts.command([str(root)], {}) == 1  # one is damaged
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines()] == ["completed", "failed", "DAMAGED:"]
    assert "2567 ms, 25500 tok/s/GPU" in text
    receipts.command([str(root)], {"end": "failed", "host": "h200_8"})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "DAMAGED" not in line] == [runs[1].name]
    receipts.command([str(root)], {"full": "true", "host": "h200_8"})
    regime = compare.at(receipt.read(runs[0]), "lineage.regime")
    assert regime in (said := capsys.readouterr()).out and "--full" not in said.err
    receipts.command([str(root)], {"family": "nam56r"})
    assert len(capsys.readouterr().out.splitlines()) == 3
    receipts.command([str(root)], {"family": "other"})
    said = capsys.readouterr()
    # a damaged one is always shown
    assert said.out.count("\n") == 1 and said.err == f"note: none of 3 receipts in {root}\n"
    assert compare.command([str(run) for run in runs], {}) == 0
    for words in (
        ["compare", str(runs[0])],
        ["compare", str(root), str(runs[0])],
        ["receipts", "nowhere"],
        ["receipts", str(root), "end=complete"],
        ["receipts", str(root), "state=lost"],
        ["compare", "--anywya"],
        ["compare", str(runs[0]), str(runs[1]), "anyway=perhaps"],
        ["no"],
    ):
        monkeypatch.setattr("sys.argv", ["launch", *words])
        with pytest.raises(SystemExit) as ended:
            command.main()
        text = capsys.readouterr().err
        assert ended.value.code == 2 and text.startswith("error: ") and "Errno" not in text


def test_committed_receipts_are_whole_and_name_no_machine():
    redactor = Redactor({})

    def text_only(node):  # what version 1 was held to
        if isinstance(node, dict):
            return {key: text_only(value) for key, value in node.items()}
        if isinstance(node, list):
            return [text_only(v) for v in node]
        return redactor.text(node) if isinstance(node, str) else node

    for folder in receipt.folders(receipts.RECEIPTS):
        found = receipt.read(folder)
        if found["schema"] == receipt.FIRST:
            assert text_only({k: v for k, v in found.items() if k != "seal"}) == {
                k: v for k, v in found.items() if k != "seal"
            }
        elif found["state"] == "sealed":
            for key in found.keys() - {*receipt.OURS, "seal", "closed"}:
                assert redactor.tree(found[key], key in receipt.WHOLE) == found[key], (folder.name, key)


def test_the_figures_that_are_compared():
    """By name: a row that is lost is missed by nobody else."""
    assert [title for title, _ in compare.FIGURES] == [
        "end", "steps", "window, first step", "window, last step", "median ms", "p10 ms", "p90 ms", "tokens/s/GPU",
        "model FLOPs utilisation", "Megatron's TFLOP/s/GPU", "peak allocated GiB", "peak reserved GiB", "forecast allocated GiB",
        "until the first step, s", "first steps' excess, s", "checkpoints, s", "last loss", "losses finite", "gradient norms finite",
        "skipped steps", "NaN steps", "NaN check",
    ]  # fmt: skip

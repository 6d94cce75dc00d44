"""Volumes, classes of folders, caches and room, from mount tables of several kinds of host."""

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.host import storage
from nam_megatron.recipe import load

ONE_DISK = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=131981020k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resv_strict,resuid=65534,resgid=65534
29 27 254:16 / /usr/local/nvidia ro,nosuid,nodev,relatime - squashfs /dev/vdb ro,errors=continue
31 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=134217728k
"""
CLUSTER = """\
27 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
40 27 259:0 / /scratch rw,relatime shared:2 - xfs /dev/nvme0n1 rw
41 27 0:50 / /durable rw,relatime shared:3 - lustre 10.0.0.1@o2ib:/fs rw,flock
42 41 0:51 / /durable/old\\040data rw - nfs4 server:/x rw
"""
CONTAINER = """\
900 1 0:200 / / rw,relatime - overlay overlay rw,lowerdir=/l
901 900 0:201 / /tmp rw - tmpfs tmpfs rw
902 900 259:1 /home /durable rw - ext4 /dev/nvme1n1p1 rw
903 900 259:2 / /durable rw - xfs /dev/nvme2n1 rw
"""
BTRFS = """\
27 1 0:30 /@ / rw - btrfs /dev/sda2 rw,subvol=/@
28 27 0:31 /@data /durable rw - btrfs /dev/sda2 rw,subvol=/@data
"""


def recipe(*overrides):
    return load("nam56r_smoke", ["cluster=h200_1", *overrides])


def used(recipe, environ=None, checkout="/durable/checkout"):
    return storage.places(
        recipe, Path(checkout), environ or {"TMPDIR": "/scratch/tmp", "TRITON_CACHE_DIR": "/scratch/triton"}
    )


def failures(found, name):
    return [f.message for f in found if f.level == "fail" and f.name == name]


@pytest.mark.parametrize(
    ("table", "path", "point", "kind"),
    [
        (ONE_DISK, "/durable/a", "/", "ext4"),
        (CLUSTER, "/durable/run/1", "/durable", "lustre"),
        (CLUSTER, "/durable/old data/x", "/durable/old data", "nfs4"),
        (CLUSTER, "/durables", "/", "ext4"),
        (CONTAINER, "/durable/x", "/durable", "xfs"),
    ],
)
def test_the_volume_of_a_path(table, path, point, kind):
    found = storage.volume(Path(path), storage.mounts(table))
    assert (str(found.point), found.kind) == (point, kind)


def test_a_host_with_one_disk_has_everything_on_the_root_volume():
    (said,) = failures(storage.root_volume(used(recipe()), storage.mounts(ONE_DISK)), "root-volume")
    assert said == "on the root volume: durable, scratch, receipts and logs, TMPDIR, TRITON_CACHE_DIR"


def test_a_cluster_host_keeps_its_root_volume_free():
    assert failures(storage.root_volume(used(recipe()), storage.mounts(CLUSTER)), "root-volume") == []
    (said,) = failures(storage.root_volume(used(recipe(), checkout="/home/u"), storage.mounts(CLUSTER)), "root-volume")
    assert said == "on the root volume: receipts and logs"


def test_a_subvolume_of_the_root_disk_is_the_root_disk():
    (said,) = failures(storage.root_volume(used(recipe()), storage.mounts(BTRFS)), "root-volume")
    assert said.startswith("on the root volume: durable")
    # Of what is no disk the source is but a word: two tmpfs are two.
    apart = storage.mounts(BTRFS.replace("/dev/sda2", "overlay"))
    assert failures(storage.root_volume(used(recipe()), apart), "root-volume") != [said]


def test_no_mount_table_is_a_finding():
    assert failures(storage.root_volume(used(recipe()), []), "root-volume")


def folders(tmp_path, **more):
    for name in ("durable", "scratch"):
        (tmp_path / name).mkdir(exist_ok=True)
    named = {"durable": tmp_path / "durable", "scratch": tmp_path / "scratch", "receipts": tmp_path / "receipts"} | more
    return [f"cluster.storage.{name}={path}" for name, path in named.items()]


def classes(tmp_path, *overrides, table=CLUSTER, environ=None):
    return failures(storage.classes(used(recipe(*overrides), environ, tmp_path), storage.mounts(table)), "storage")


def test_folders_that_are_there_pass(tmp_path):
    save = tmp_path / "durable/checkpoints"
    assert classes(tmp_path, *folders(tmp_path), f"schedule.save={save}", "schedule.save_interval=1") == []


def test_each_missing_or_misplaced_folder_is_named(tmp_path):
    given = folders(tmp_path, scratch=tmp_path / "nowhere")
    said = classes(tmp_path, *given, f"schedule.save={tmp_path}/elsewhere", "schedule.save_interval=1")
    assert len(said) == 2
    assert f"scratch folder `{tmp_path}/nowhere` is not there" in said
    assert any("save: " in s and "outside the durable folder" in s for s in said)


def test_weights_and_a_tokenizer_on_the_root_volume_are_named(tmp_path):
    """They were left out, and nothing of the run was said to lie there."""
    words = ("data=indexed", "data.path=/durable/corpus", "data.tokenizer=/opt/tokenizer", "data.cache=/var/order")
    looked = used(recipe(*words, "schedule.pretrained=/opt/weights"))
    (said,) = failures(storage.root_volume(looked, storage.mounts(CLUSTER)), "root-volume")
    assert said == "on the root volume: pretrained, tokenizer, order of samples"
    tracked = (
        "feature.tracking.tensorboard=/var/events",
        "feature.tracking.mlflow=/opt/mlruns",
        "feature.tracking.mlflow_experiment=e",
    )
    (said,) = failures(storage.root_volume(used(recipe(*tracked)), storage.mounts(CLUSTER)), "root-volume")
    assert said == "on the root volume: TensorBoard, MLflow"
    for address, looked_at in (("databricks", []), ("https://here/x", []), ("file:///opt/mlruns", ["/opt/mlruns"])):
        words = (f"feature.tracking.mlflow={address}", "feature.tracking.mlflow_experiment=e")
        assert [str(place.path) for place in used(recipe(*words)) if place.kind == "told"] == looked_at
    (said,) = classes(tmp_path, *folders(tmp_path), f"schedule.pretrained={tmp_path}/weights")
    assert said.startswith("pretrained: ") and "outside the durable folder" in said


def test_only_what_is_written_must_be_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_writable", lambda path: False)
    at = tmp_path / "durable"
    data = ("data=blend", f"data.parts=[{{weight: 1, path: {at}/corpus}}]", f"data.tokenizer={at}/t")
    said = classes(tmp_path, *folders(tmp_path), *data, f"schedule.load={at}/c", f"schedule.pretrained={at}/p")
    assert [s.partition(":")[0] for s in said] == [
        "durable",
        "scratch",
        "receipts and logs",
        "TMPDIR",
        "TRITON_CACHE_DIR",
    ]


def test_a_file_in_the_way_of_the_receipts(tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = classes(tmp_path, *folders(tmp_path, receipts=tmp_path / "file/receipts"))
    assert said.endswith("cannot be written to") and said.startswith("receipts")


def test_what_is_kept_must_not_lie_in_memory(tmp_path):
    (said,) = classes(tmp_path, *folders(tmp_path), table=f"1 0 0:9 / / rw - tmpfs tmpfs rw\n{CLUSTER.splitlines()[1]}")
    assert "durable folder lies on tmpfs" in said


def test_caches_beside_the_data(tmp_path):
    def look(*overrides, **environ):
        return failures(storage.caches(used(recipe(*folders(tmp_path), *overrides), environ)), "caches")

    triton = str(tmp_path / "scratch/triton")
    assert look(TRITON_CACHE_DIR=triton) == []
    assert look(f"cluster.storage.durable={tmp_path}", TRITON_CACHE_DIR=triton) == [
        "on the data path: TRITON_CACHE_DIR"
    ]
    data = ("data=indexed", f"data.path={tmp_path}/scratch/corpus", "data.tokenizer=t")
    assert look(*data, TRITON_CACHE_DIR=triton) == ["on the data path: TRITON_CACHE_DIR"]
    data = ("data=blend", f"data.parts=[{{weight: 1, path: {tmp_path}/scratch/corpus}}]", "data.tokenizer=t")
    assert look(*data, TRITON_CACHE_DIR=triton) == ["on the data path: TRITON_CACHE_DIR"]
    (tmp_path / "link").symlink_to(tmp_path / "durable")
    assert look(TMPDIR=f"{tmp_path}/link/tmp") == ["on the data path: TMPDIR"]


@pytest.mark.parametrize(("interval", "count"), [(5, 2), (10, 1), (3, 3), (100, 1)])
def test_all_checkpoints_of_a_run_must_fit(interval, count):
    plan = recipe("schedule.train_steps=10", f"schedule.save_interval={interval}", "schedule.save=/durable/c")
    need = count * 14 * 1000
    assert storage.space(plan, 1000, need).level == "ok"
    found = storage.space(plan, 1000, need - 1)
    assert found.level == "fail" and found.message.startswith(f"{count} checkpoints")
    assert storage.space(plan, 1000, None).level == "fail"


@pytest.mark.parametrize(("most", "level"), [(resource.RLIM_INFINITY, "ok"), (3500, "ok"), (3499, "fail")])
def test_a_limit_on_files_is_told_before_a_checkpoint_breaks_on_it(monkeypatch, most, level):
    """torch says `unexpected pos` of it."""
    monkeypatch.setattr(storage.resource, "getrlimit", lambda _: (most, resource.RLIM_INFINITY))
    plan = recipe("cluster=h200_2", "schedule.save_interval=1", "schedule.save=/durable/c")
    assert storage.space(plan, 1000, 10**9).level == level and storage.space(recipe(), 1000, 0).level == "ok"


def test_without_checkpoints_any_room_is_enough():
    assert storage.space(recipe(), 10**12, 0).level == "ok"


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert abs(storage.free(tmp_path / "a/b") - storage.free(tmp_path)) < 1 << 30


def test_facts_name_no_path(tmp_path):
    known = storage.facts(used(recipe(*folders(tmp_path))), storage.mounts(CLUSTER))
    assert set(known) == {"durable", "scratch", "receipts"} and str(tmp_path) not in str(known)
    assert known["durable"]["root_volume"] is True  # pytest's folder is no mount of that table


@given(
    st.text()
    | st.lists(st.sampled_from(["27 1 8:2 / / rw", " - ", "ext4 /dev/sda", "\\040", "\\777", "\n"])).map(" ".join)
)
def test_no_mount_table_ends_in_a_traceback(table):
    mounted = storage.mounts(table)
    list(storage.root_volume([storage.Place("durable", "durable", Path("/a"))], mounted))


@pytest.mark.parametrize(
    ("kind", "on", "level"),
    [
        ("ext4", "/dev/sdb1", "ok"),
        ("ext4", "/dev/sda1", "fail"),  # the root volume, beside a data disk
        ("ext4", "/dev/nvme1", "fail"),  # the scratch disk: the host that was lost had its environment there
        ("tmpfs", "tmpfs", "fail"),
        ("overlay", "overlay", "note"),
    ],
)
def test_an_environment_on_a_disk_that_can_be_lost_or_filled(kind, on, level):
    mounted = [
        storage.Mount(Path("/"), "8:1", "ext4", "/dev/sda1"),
        storage.Mount(Path("/data"), "8:2", "ext4", "/dev/sdb1"),
        storage.Mount(Path("/scratch"), "259:1", "ext4", "/dev/nvme1"),
        storage.Mount(Path("/venv"), "259:1" if "nvme" in on else f"0:{len(on)}", kind, on),
    ]
    used = [storage.Place("durable", "durable", Path("/data")), storage.Place("scratch", "scratch", Path("/scratch"))]
    found = storage.environment([storage.Place("the virtual environment", "program", Path("/venv"))], used, mounted)
    assert found.level == level
    if level == "fail":
        assert "the virtual environment (`/venv`)" in found.message


def test_one_disk_for_all_is_no_reason(tmp_path):
    mounted = [storage.Mount(Path("/"), "8:1", "ext4", "/dev/sda1")]
    used = [storage.Place(n, n, Path(f"/{n}")) for n in ("durable", "scratch")]
    assert storage.environment(storage.programs({"HOME": str(tmp_path)}), used, mounted).level == "ok"

"""`nvidia-smi topo -m` of real hosts, good and bad."""

import itertools

import pytest
from hosts import FIXTURES, smi
from hypothesis import given
from hypothesis import strategies as st

from launch.host import gpu, topology


def read(name):
    return topology.parse((FIXTURES / f"topo_{name}.txt").read_text())


def failures(matrix, count, link="NV18"):
    return [f.message for f in topology.findings(matrix, link, count) if f.level == "fail"]


@pytest.mark.parametrize(("name", "count"), [("h200_x1", 1), ("h200_x4", 4), ("h200_x8_nics", 8), ("one_gpu_nics", 1)])
def test_good_hosts_pass(name, count):
    assert failures(read(name), count) == []


@pytest.mark.parametrize(
    ("name", "count", "links"),
    [("pcie_x8", 8, {"NODE": 12, "SYS": 16}), ("phb_x2", 2, {"PHB": 1}), ("l40_x4_nics", 4, {"NODE": 2, "SYS": 4})],
)
def test_every_pair_without_nvlink_fails(name, count, links):
    said = failures(read(name), count)
    assert [s.split(" between ")[0] for s in said] == list(links)
    for message, pairs in zip(said, links.values(), strict=True):
        more = int(message.split(" and ")[1].split(" ")[0]) if " more" in message else 0
        assert message.count("GPU") == 2 * (pairs - more)


def test_one_weak_pair_of_a_good_host_is_named_whichever_direction_shows_it():
    text = (FIXTURES / "topo_h200_x8_nics.txt").read_text().splitlines(keepends=True)
    row = next(i for i, line in enumerate(text) if line.startswith("GPU5"))
    text[row] = text[row].replace("NV18", "NV12", 1)
    assert failures(topology.parse("".join(text)), 8) == ["NV12 between GPU0-GPU5, and the device file expects NV18"]


def test_a_table_that_is_cut_off_lacks_links():
    text = (FIXTURES / "topo_h200_x4.txt").read_text()
    missing = "no link between GPU0-GPU3, GPU1-GPU3, GPU2-GPU3, and the device file expects NV18"
    assert failures(topology.parse(text.split("GPU3\tNV18")[0]), 4) == [missing]
    assert failures(topology.parse(text.replace("GPU3\tNV18\t", "GPU3\t")), 4)  # cells that moved


def test_fewer_gpus_than_the_plan_is_for():
    assert failures(read("h200_x4"), 8) == ["4 GPUs in the matrix, and the plan is for 8 a host"]


def test_nics_and_cpus_near_each_gpu():
    known = topology.facts(read("h200_x8_nics"))
    assert known["links"] == "NV18" and known["cpus"]["GPU4"] == "64-127,192-255"
    # each GPU has a NIC of its own
    assert sorted(n for near in known["nics"].values() for n in near) == [f"mlx5_{i} (PIX)" for i in range(8)]
    assert topology.facts(read("one_gpu_nics"))["nics"]["GPU0"][0] == "rocep1s0f0 (NODE)"


def test_older_drivers_name_the_nic_in_the_header():
    old = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-23\nGPU1\tNV18\t X \tSYS\t24-47\nmlx5_0\tPIX\tSYS\t X \t\n"
    matrix = topology.parse(old)
    assert (matrix.nearest("GPU0"), matrix.nearest("GPU1")) == (["mlx5_0 (PIX)"], ["mlx5_0 (SYS)"])
    assert failures(matrix, 2) == []


@pytest.mark.parametrize("links", [*itertools.combinations(["PIX", "PXB", "PHB", "NODE", "SYS"], 2)], ids="-".join)
def test_the_nearest_nic_crosses_the_fewest_bridges(links):
    """As the legend of nvidia-smi has them; whichever comes first."""
    for row in (links, links[::-1]):
        nics = {f"NIC{i}": link for i, link in enumerate(row)}
        matrix = topology.Topology(("GPU0",), tuple(nics), {("GPU0", n): link for n, link in nics.items()}, {}, {})
        assert matrix.nearest("GPU0") == [f"NIC{row.index(links[0])} ({links[0]})"]


def test_a_copy_from_a_terminal_has_blanks_for_tabs():
    text = (FIXTURES / "topo_h200_x8_nics.txt").read_text().expandtabs(8)
    assert topology.parse(text).links == read("h200_x8_nics").links


def test_nvml_counts_links_that_the_matrix_only_names():
    assert [f.level for f in topology.counted({"0": 18, "1": 18}, "NV18")] == ["ok"]
    (found,) = topology.counted({"0": 18, "1": 16}, "NV18")
    assert found.level == "fail" and "GPU 1 has 16" in found.message
    assert [f.level for f in topology.counted({"0": 18, "1": None}, "NV18")] == ["note"]
    assert list(topology.counted({"0": 0}, "NV18")) == []  # one GPU needs none


def test_an_unfinished_fabric_fails_although_the_matrix_is_whole():
    assert list(topology.fabric(gpu.parse(smi(4)).gpus)) == []
    (found,) = topology.fabric(gpu.parse(smi(4, at=2, fabric="In Progress")).gpus)
    assert found.message == "GPU 2: fabric is `In Progress`"


CELL = st.sampled_from(
    ["X", " X ", "NV18", "NV999999999999999999999", "SYS", "PIX", "", "GPU0", "GPU1", "NIC0", "0-3", "N/A", "\x1b[4m"]
)


@given(st.lists(st.lists(CELL, max_size=6).map("\t".join), max_size=8).map("\n".join) | st.text())
def test_no_table_ends_in_a_traceback(text):
    matrix = topology.parse(text)
    if matrix:
        list(topology.findings(matrix, "NV18", 2))
        topology.facts(matrix)


@given(st.data())
def test_any_changed_cell_between_two_gpus_is_found(data):
    lines = (FIXTURES / "topo_h200_x4.txt").read_text().splitlines()
    row = data.draw(st.integers(0, 3))
    column = data.draw(st.integers(0, 3).filter(lambda c: c != row))
    cells = lines[1 + row].split("\t")
    cells[1 + column] = data.draw(st.sampled_from(["SYS", "PHB", "NODE", "PIX", "NV1", "NV17", "", "?", "X"]))
    lines[1 + row] = "\t".join(cells)
    assert failures(topology.parse("\n".join(lines)), 4)

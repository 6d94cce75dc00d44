"""`nvidia-smi -q -x`: healthy GPUs pass, and each thing that can be wrong is named with its GPU."""

import xml.etree.ElementTree as ET

import pytest
from hosts import FIXTURES, process, smi
from hypothesis import given
from hypothesis import strategies as st

from launch.host import gpu
from nam_megatron.recipe import load

DEVICE = load("nam56r_smoke").device


def look(text, count, cuda="13.0"):
    return list(gpu.findings(gpu.parse(text), DEVICE, count, cuda))


def failures(text, count=4, cuda="13.0"):
    return {(f.name, f.message) for f in look(text, count, cuda) if f.level == "fail"}


@pytest.mark.parametrize("count", [1, 8])
def test_a_healthy_host_passes_and_says_each_thing_once(count):
    found = look(smi(count), count)
    assert {f.level for f in found} == {"ok"}
    assert [f.name for f in found] == [
        "driver",
        "gpus",
        "ecc",
        "throttle",
        "clocks",
        "pcie",
        "heat",
        "mode",
        "vbios",
        "idle",
    ]


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"ecc": "Disabled"}, "ecc", "GPU 2: ECC is off"),
        ({"ecc": "N/A"}, "ecc", "GPU 2: whether ECC is on cannot be read"),
        ({"dram": "1"}, "ecc", "GPU 2: uncorrected memory errors since the driver was loaded"),
        ({"sram": "2"}, "ecc", "GPU 2: uncorrected memory errors since the driver was loaded"),
        ({"remap": "Yes"}, "ecc", "GPU 2: rows wait to be remapped"),
        ({"recovery": "Reset"}, "ecc", "GPU 2: recovery action: Reset"),
        ({"hw_thermal": "Active"}, "throttle", "GPU 2: hw thermal slowdown"),
        ({"hw_slowdown": "Active"}, "throttle", "GPU 2: hw slowdown"),
        ({"limit": "500.00 W"}, "clocks", "GPU 2: power limit below the default"),
        ({"app": "1200 MHz"}, "clocks", "GPU 2: application clocks below the default"),
        ({"mig": "Enabled"}, "gpus", "GPU 2: cut up by MIG"),
        ({"total": "81559 MiB"}, "gpus", f"GPU 2: memory is not that of `h200` ({DEVICE.total_gib} GiB)"),
        ({"name": "NVIDIA H100"}, "gpus", "GPUs of several kinds: NVIDIA H100, NVIDIA H200"),
        ({"used": "9000 MiB"}, "idle", "GPU 2: 9000 MiB in use by a process that cannot be seen from here"),
        ({"width": "8x"}, "pcie", "GPU 2: fewer PCIe lanes than it has"),
        ({"gen": "3"}, "pcie", "GPU 2: a slower PCIe generation than it has"),
        ({"replays": "4711"}, "pcie", "GPU 2: 100 or more PCIe replays since the driver was loaded"),
        (
            {"tlimit": "5 C"},
            "heat",
            "GPU 2: less than 10 degrees below the point where it slows down, and nothing runs yet",
        ),
        ({"memory_temp": "97 C"}, "heat", "GPU 2: memory at 85 degrees or more, and nothing runs yet"),
        ({"spare": "1 bank(s)"}, "ecc", "GPU 2: a bank has no spare rows left"),
        ({"exceeded": "Yes"}, "ecc", "GPU 2: SRAM errors are over the threshold at which the vendor replaces it"),
        ({"corrected": "5000"}, "ecc", "GPU 2: 100 or more corrected memory errors since the driver was loaded"),
        ({"compute": "Prohibited"}, "mode", "GPU 2: compute mode lets no process in"),
        ({"cap": "Active"}, "throttle", "GPU 2: the power cap slows it while nothing runs"),
        ({"vbios": "96.00.68.00.01"}, "vbios", "GPU 2: another VBIOS than GPU 0 (96.00.68.00.01, 96.00.A5.00.1A)"),
    ],
)
def test_what_is_wrong_with_one_gpu_is_said_of_it(changes, name, message):
    assert (name, message) in failures(smi(4, at=2, **changes))


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"persistence": "Disabled"}, "mode", "GPU 2: persistence mode is off"),
        ({"compute": "Exclusive_Process"}, "mode", "GPU 2: compute mode lets one process in"),
        ({"remapped": "2"}, "ecc", "GPU 2: rows were remapped after uncorrectable errors"),
        ({"gen": "1", "state": "P8"}, "pcie", "GPU 2: a slower PCIe generation than it has, at rest"),
        ({"dram": "N/A"}, "ecc", "GPU 2: uncorrected memory errors cannot be read"),
        (
            dict.fromkeys(("hw_slowdown", "hw_thermal", "sw_thermal"), "N/A"),
            "throttle",
            "GPU 2: whether heat or power slows it cannot be read",
        ),
        ({"compute": "N/A"}, "mode", "GPU 2: its compute or persistence mode cannot be read"),
        ({"persistence": "N/A"}, "mode", "GPU 2: its compute or persistence mode cannot be read"),
        ({"corrected": "N/A"}, "ecc", "GPU 2: corrected memory errors cannot be read"),
        ({"remapped": "N/A"}, "ecc", "GPU 2: remapped rows cannot be read"),
        ({"spare": "N/A"}, "ecc", "GPU 2: remapped rows cannot be read"),
        ({"exceeded": "N/A"}, "ecc", "GPU 2: whether SRAM errors are over the vendor's threshold cannot be read"),
        ({"replays": "N/A"}, "pcie", "GPU 2: its PCIe link or replays cannot be read"),
        ({"width": "N/A"}, "pcie", "GPU 2: its PCIe link or replays cannot be read"),
        ({"tlimit": "N/A"}, "heat", "GPU 2: how warm it is cannot be read"),
        ({"memory_temp": "N/A"}, "heat", "GPU 2: how warm it is cannot be read"),
        ({"used": "N/A"}, "idle", "GPU 2: memory in use cannot be read, nor whether somebody is on it"),
    ],
)
def test_what_is_worth_knowing_of_one_gpu_is_noted(changes, name, message):
    text = smi(4, at=2, **changes)
    assert failures(text) == set() and not [f for f in look(text, 4) if f.name == name and f.level == "ok"]
    assert [f.message for f in look(text, 4) if f.level == "note" and f.name == name and f.message.startswith(message)]


def test_deprecated_clocks_are_no_lowered_ones():
    assert failures(smi(4, app="Requested functionality has been deprecated")) == set()


def test_processes_are_named_by_pid_without_the_users_path():
    ((name, message),) = failures(smi(4, at=1, processes=process(4711) + process(4712, "x", "N/A"), used="5 MiB"))
    assert name == "idle" and message == "GPU 1 is in use by PID 4711 (python, 4242 MiB), PID 4712 (x, ? MiB)"


@pytest.mark.parametrize("there", [2, 8])
def test_another_number_of_gpus_than_the_plan_is_for(there):
    assert ("gpus", f"{there} GPUs, and the plan is for 4 a host") in failures(smi(there))


@pytest.mark.parametrize(
    ("driver_cuda", "fails"), [("12.8", True), ("13.0", False), ("13.1", False), ("Not Found", True)]
)
def test_a_driver_older_than_torchs_cuda(driver_cuda, fails):
    assert any(name == "driver" for name, _ in failures(smi(4, cuda=driver_cuda))) == fails


def test_a_real_report_of_an_a100_cut_up_by_mig():
    said = failures((FIXTURES / "smi_a100_mig.xml").read_text(), 4, "12.2")
    assert ("gpus", "GPU 0: cut up by MIG") in said and not any(name in ("ecc", "throttle") for name, _ in said)


def test_a_real_report_of_an_h200_passes():
    found = look((FIXTURES / "smi_h200_580.xml").read_text(), 1)
    assert {f.level for f in found} == {"ok"} and "1 x NVIDIA H200, 143771 MiB each" in {f.message for f in found}


def test_pretend_hosts_say_nothing_that_a_real_one_does_not():
    def paths(node, at=""):
        return {at + node.tag} | {p for child in node for p in paths(child, f"{at}{node.tag}/")}

    assert paths(ET.fromstring(smi())) <= paths(ET.parse(FIXTURES / "smi_h200_580.xml").getroot())


def test_a_real_report_of_drivers_older_and_newer():
    old = gpu.parse((FIXTURES / "smi_gtx_530.xml").read_text())
    assert [p.pid for p in old.gpus[0].processes] == [200870, 1688347]
    assert old.cuda is None and old.gpus[0].limit_w == 190 and old.gpus[0].ecc is None
    new = gpu.parse((FIXTURES / "smi_rtx_590.xml").read_text()).gpus[0]
    assert (new.ecc, new.used_mib, new.app_mhz, new.repair) == (False, 65720, None, ())


def test_facts_name_no_part_of_a_host():
    said = str(gpu.facts(gpu.parse(smi(2, processes=process(1)))))
    assert "NVIDIA H200" in said and "GPU-" not in said and "1650" not in said and "someone" not in said


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log>", "<a/>", "\x00", smi(1)[:2000]])
def test_what_is_no_report_is_none(text):
    assert gpu.parse(text) is None


WORDS = st.sampled_from(
    ["Enabled", "N/A", "", "-1 MiB", "9" * 30 + " MiB", "1e999", "٣ MiB", "Yes", "Active", "[Unknown Error]"]
) | st.text(st.characters(exclude_categories=["C"], exclude_characters="<&"), max_size=8)


@given(st.dictionaries(st.sampled_from(sorted(set(smi.__globals__["HEALTHY"]) - {"processes"})), WORDS), WORDS, WORDS)
def test_no_value_ends_in_a_traceback(changes, pid, cuda):
    text = smi(2, cuda=cuda, processes=f"<process_info><pid>{pid}</pid></process_info>", **changes)
    look(text, 2)
    gpu.facts(gpu.parse(text))


@given(st.lists(st.integers(0, 9), min_size=1, unique=True))
def test_a_list_of_gpus_is_short_and_says_all(numbers):
    gpus = gpu.parse(smi(10)).gpus
    said = gpu.on([gpus[n] for n in numbers]).split(" ", 1)[1]
    spans = [tuple(map(int, part.split("-"))) for part in said.split(", ")]
    assert sorted(n for span in spans for n in range(span[0], span[-1] + 1)) == sorted(numbers)

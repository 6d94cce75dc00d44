"""Pretend hosts: what `nvidia-smi` of driver 580 prints on H200s, healthy but for what a test changes, and the program that prints it."""

import stat
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"

GPU = """
	<gpu id="00000000:{bus}:00.0">
		<product_name>{name}</product_name>
		<product_architecture>Hopper</product_architecture>
		<mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
		<serial>1650000000000</serial>
		<uuid>GPU-00000000-0000-0000-0000-000000000000</uuid>
		<gpu_recovery_action>{recovery}</gpu_recovery_action>
		<persistence_mode>{persistence}</persistence_mode>
		<vbios_version>{vbios}</vbios_version>
		<pci>
			<pci_bus_id>00000000:{bus}:00.0</pci_bus_id>
			<pci_gpu_link_info>
				<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>{gen}</current_link_gen></pcie_gen>
				<link_widths><max_link_width>16x</max_link_width><current_link_width>{width}</current_link_width></link_widths>
			</pci_gpu_link_info>
			<replay_counter>{replays}</replay_counter>
		</pci>
		<performance_state>{state}</performance_state>
		<compute_mode>{compute}</compute_mode>
		<temperature>
			<gpu_temp>32 C</gpu_temp>
			<gpu_temp_tlimit>{tlimit}</gpu_temp_tlimit>
			<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
			<memory_temp>{memory_temp}</memory_temp>
		</temperature>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>{cap}</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>{hw_slowdown}</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>{hw_thermal}</clocks_event_reason_hw_thermal_slowdown>
			<clocks_event_reason_sw_thermal_slowdown>{sw_thermal}</clocks_event_reason_sw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage><total>{total}</total><reserved>635 MiB</reserved><used>{used}</used></fb_memory_usage>
		<ecc_mode><current_ecc>{ecc}</current_ecc><pending_ecc>{ecc}</pending_ecc></ecc_mode>
		<ecc_errors>
			<volatile>
				<sram_correctable>{corrected}</sram_correctable>
				<sram_uncorrectable_parity>{sram}</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>0</dram_correctable>
				<dram_uncorrectable>{dram}</dram_uncorrectable>
			</volatile>
			<aggregate><dram_uncorrectable>7</dram_uncorrectable><sram_threshold_exceeded>{exceeded}</sram_threshold_exceeded></aggregate>
		</ecc_errors>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr>
			<remapped_row_unc>{remapped}</remapped_row_unc>
			<row_remapper_histogram>
				<row_remapper_histogram_low>0 bank(s)</row_remapper_histogram_low>
				<row_remapper_histogram_none>{spare}</row_remapper_histogram_none>
			</row_remapper_histogram>
			<remapped_row_pending>{remap}</remapped_row_pending>
			<remapped_row_failure>No</remapped_row_failure>
		</remapped_rows>
		<gpu_power_readings>
			<current_power_limit>{limit}</current_power_limit>
			<default_power_limit>700.00 W</default_power_limit>
		</gpu_power_readings>
		<clocks><sm_clock>345 MHz</sm_clock></clocks>
		<applications_clocks><graphics_clock>{app}</graphics_clock></applications_clocks>
		<default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks>
		<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
		<fabric><state>{fabric}</state><status>Success</status></fabric>
		<processes>{processes}</processes>
	</gpu>"""
HEALTHY = {
    "name": "NVIDIA H200", "mig": "Disabled", "recovery": "None", "hw_slowdown": "Not Active", "hw_thermal": "Not Active",
    "total": "143771 MiB", "used": "0 MiB", "ecc": "Enabled", "sram": "0", "dram": "0", "remap": "No", "limit": "700.00 W",
    "app": "1980 MHz", "fabric": "Completed", "processes": "", "persistence": "Enabled",
    "vbios": "96.00.A5.00.1A", "gen": "5", "width": "16x",
    "replays": "0", "state": "P0", "compute": "Default", "tlimit": "56 C", "memory_temp": "35 C", "cap": "Not Active", "corrected": "3",
    "sw_thermal": "Not Active", "exceeded": "No", "remapped": "0", "spare": "0 bank(s)",
}  # fmt: skip


def process(pid: int, name: str = "/home/someone/python -m x", mib: str = "4242 MiB") -> str:
    return (
        f"<process_info><pid>{pid}</pid><type>C</type><process_name>{name}</process_name>"
        f"<used_memory>{mib}</used_memory></process_info>"
    )


def smi(count: int = 1, at: int = 0, driver: str = "580.159.04", cuda: str = "13.0", **changes: str) -> str:
    """The XML report of `count` GPUs; `changes` are of GPU `at`."""
    gpus = (GPU.format(bus=f"{i:02X}", **{**HEALTHY, **(changes if i == at else {})}) for i in range(count))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"\t<driver_version>{driver}</driver_version>\n\t<cuda_version>{cuda}</cuda_version>\n"
        f"\t<attached_gpus>{count}</attached_gpus>{''.join(gpus)}\n</nvidia_smi_log>\n"
    )


def program(folder: Path, name: str, script: str) -> Path:
    """An executable `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def nvidia_smi(folder: Path, report: str, topo: str) -> Path:
    """A program that answers the two questions that preflight asks."""
    folder.mkdir(exist_ok=True)
    (folder / "report").write_text(report)
    (folder / "topo").write_text(topo)
    return program(folder, "nvidia-smi", f'[ "$1" = topo ] && exec cat {folder}/topo; exec cat {folder}/report')

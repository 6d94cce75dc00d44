"""`python -m launch check`: look at a host from every side, at once, and say all that was found. Changes nothing."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.context import Context
from launch.finding import Finding, waive
from launch.host import gpu, linux, sanity, stack, storage, topology
from launch.host.bounded import ask, at_once
from launch.record import source
from launch.run import job, overlay
from nam_megatron.budget import parameters
from nam_megatron.compile.argv import plan_json
from nam_megatron.compile.plan import Plan
from nam_megatron.rehearsal import NOTE

SECONDS = 15  # for one question to the driver
# Findings without which the sanity pass would only fail in another way, or disturb somebody.
NEEDED = ("torch", "gpus", "driver", "idle", "stale", "port")
Look = tuple[list[Finding], dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """findings: all of them, waived where the cluster file says so. facts: for the receipt, without host and user names."""

    findings: list[Finding]
    facts: dict[str, Any]


def check(context: Context) -> Report:
    """Look at this host. For several GPUs also GEMMs and collectives, where nothing speaks against them; `sanity` says otherwise."""
    # As the run would have it, but for what an import would leave behind.
    environ = {**context.child_environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if context.cluster.processor == "cpu":
        return rehearsal(context)
    lock = stack.load(Path(given)) if (given := context.words["lock"]) else stack.load()
    # Before anything of ours imports CUDA: an import that opens a GPU would be found on it.
    devices = gpus(context, environ, lock)
    with ThreadPoolExecutor() as pool:
        try:
            looks = [
                pool.submit(software, environ, lock, context.lowering.plan),
                pool.submit(links, context, environ),
                pool.submit(system, context, environ),
                pool.submit(disks, context, environ),
            ]
            packages, *others = (look.result() for look in looks)
        except BaseException:  # Ctrl-C does not reach what the threads wait for, or are about to start
            with at_once():
                pool.shutdown(cancel_futures=True)
            raise
    looked = [packages, devices, *others, intent(context)]
    findings = waive((f for found, _ in looked for f in found), context.cluster.waivers)
    facts = {k: v for _, known in looked for k, v in known.items()}
    if wanted(context):
        found, facts["sanity"] = passes(context, environ, findings)
        findings += waive(found, context.cluster.waivers)
    return Report(findings, facts)


def rehearsal(context: Context) -> Report:
    """For a run on a CPU: the Megatron that is here, the port, room for checkpoints, the code, the plan and the environment."""
    tree, state = stack.megatron()
    installed = stack.versions(stack.load())
    plan = context.lowering.plan
    found = [
        Finding("gpus", "note", NOTE),
        Finding("lock", "note", "the locked stack of a training host is not asked for"),
        replace(tree, level="note") if state == "pristine" else tree,
        linux.port_free(context.words["port"]),
        storage.space(plan.recipe, parameters(plan)[0], storage.free(context.durable)),
        *intent(context)[0],
    ]
    return Report(
        waive(found, context.cluster.waivers), {"versions": installed, "megatron": state, "host": linux.facts()}
    )


def wanted(context: Context) -> bool:
    """Whether the sanity pass is: a link that is slow or dead shows in nothing else."""
    said = context.words["sanity"]
    return context.cluster.gpus_per_node > 1 if said is None else said


def fingerprint(facts: Mapping[str, Any]) -> str:
    """What hosts of one job must have in common: packages, code at Python's start, torch, Megatron, driver, VBIOS, and of `shared` the
    plan, what it needs and our own code. For comparison only."""
    names = ("versions", "torch", "megatron", "driver", "driver_cuda", "plan", "packages", "code")
    same = {name: facts.get(name) for name in names}
    same["vbios"] = sorted({str(g.get("vbios")) for g in facts.get("gpus") or []})
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:12]


def shared(context: Context) -> dict[str, Any]:
    """What is known of a host without a look at it; a receipt has it in places of its own."""
    return {"plan": plan_json(context.lowering), "packages": job.packages(context), "code": context.source.trees}


def software(environ: Mapping[str, str], lock: stack.Lock, plan: Plan) -> Look:
    with ThreadPoolExecutor(1) as pool:
        tree, compiled = pool.submit(stack.megatron), pool.submit(list, stack.bytecode_of_megatron())
        imported = stack.probe(lock, environ)
        finding, state = tree.result()
    installed = stack.versions(lock)
    found = [*stack.findings(lock, installed, imported), *stack.asked(plan, installed), finding, *compiled.result()]
    known = {k: v for k, v in imported.get("torch", {}).items() if k != "error"}
    return found, {"versions": installed, "torch": known, "megatron": state}


def gpus(context: Context, environ: Mapping[str, str], lock: stack.Lock) -> Look:
    answer = ask(gpu.WORDS, SECONDS, environ)
    smi = gpu.parse(answer.out) if answer.ok else None
    if smi is None:
        said = answer.failure if not answer.ok else "it printed no report"
        hint = "is this a host with GPUs, and its driver loaded? A rehearsal without any: `cluster=cpu`"
        return [Finding("gpus", "fail", f"`{' '.join(gpu.WORDS)}`: {said}", hint)], {}
    device, cluster = context.lowering.plan.recipe.device, context.cluster
    found = [*gpu.findings(smi, device, cluster.gpus_per_node, lock.torch_cuda)]
    if cluster.gpus_per_node > 1:
        found += topology.fabric(smi.gpus)
    return found, gpu.facts(smi)


def links(context: Context, environ: Mapping[str, str]) -> Look:
    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(stack.probed, "nvlinks", environ, SECONDS)
        answer = ask(topology.WORDS, SECONDS, environ)
        counted = counting.result()
    matrix = topology.parse(answer.out) if answer.ok else None
    if matrix is None:
        said = answer.failure if not answer.ok else "it printed no matrix"
        return [Finding("topology", "fail", f"`{' '.join(topology.WORDS)}`: {said}", "look at what it prints")], {}
    link = context.lowering.plan.recipe.device.link
    found = [*topology.findings(matrix, link, context.cluster.gpus_per_node)]
    if active := counted.get("active"):
        found += topology.counted(active, link)
    elif len(matrix.gpus) > 1:
        found.append(Finding("topology", "note", f"NVLinks were not counted by NVML: {counted.get('error')}"))
    return found, {"topology": {**topology.facts(matrix), "nvlinks": active}}


def system(context: Context, environ: Mapping[str, str]) -> Look:
    found = [
        linux.numa(linux.text(linux.PROC / linux.BALANCING)),
        linux.stale(linux.processes(), os.getpid()),
        linux.port_free(context.words["port"]),
        linux.network(linux.infiniband(), context.cluster.nodes),
        linux.xid(linux.kernel_log(SECONDS)),
        *linux.limits(context.cluster.nodes),
        linux.shm(context.cluster.gpus_per_node),
        linux.clock(context.cluster.nodes),
        linux.compiling(environ),
    ]
    return found, {"host": linux.facts()}


def disks(context: Context, environ: Mapping[str, str]) -> Look:
    plan = context.lowering.plan
    mounted = storage.mounts(linux.text(storage.MOUNTS) or "")
    used = storage.places(plan.recipe, context.checkout, environ)
    target = next((p.path for p in used if p.name == "save"), context.durable)
    found = [
        *storage.findings(used, mounted),
        storage.environment(storage.programs(environ), used, mounted),
        storage.space(plan.recipe, parameters(plan)[0], storage.free(target)),
    ]
    return found, {"storage": storage.facts(used, mounted)}


def intent(context: Context) -> Look:
    """What needs no look at the host: the code, the plan, the environment."""
    words = context.words
    diagnostic = NOTE if context.cluster.processor == "cpu" else words["diagnostic"]  # to a CPU no GPU is hidden
    shell = overlay.findings(context.environ, context.envs, diagnostic)
    code = (*source.findings(context.source, words["dirty"]), *stack.bytecode())
    return [*code, *job.findings(context), *shell], {}


def passes(context: Context, environ: Mapping[str, str], findings: list[Finding]) -> Look:
    stand = dict.fromkeys(f.name for f in findings if f.level == "fail" and f.name in NEEDED)
    if stand:
        return [Finding("gemm", "fail", f"the sanity pass was not run: {', '.join(stand)} first")], {}
    device = context.lowering.plan.recipe.device
    return sanity.run(device, context.cluster.gpus_per_node, context.words["port"], environ)

"""Kubernetes: a PyTorchJob (Kubeflow training-operator, kubeflow.org/v1) or a TrainJob (Kubeflow Trainer 2) for a recipe."""

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from launch.host.storage import grace
from launch.run.slurm import for_launch, for_translate, key_of
from nam_megatron import report
from nam_megatron.budget import parameters
from nam_megatron.errors import Problem, raise_if
from nam_megatron.launcher import PROGRAM

if TYPE_CHECKING:
    from launch.context import Context

LONGEST_NAME = 50  # characters; the operator appends `-worker-123`


def pytorch_job(context: "Context") -> str:
    """The job as YAML. The image holds this checkout as its working directory and the packages of launch/host/stack.toml.

    One node runs `launch run`, which leaves a receipt. Several are started by the operator, which tells each which one it is: they are
    checked, each for itself, and leave no receipt.

    Raises Refused where no image is named, or a folder is not.
    """
    raise_if(objections(context))
    cluster, pod = context.cluster, spec(context, "pytorch")  # the operator looks for a container of that name
    replicas = {"Master": 1, **({"Worker": cluster.nodes - 1} if cluster.nodes > 1 else {})}
    deadline = {"runPolicy": {"activeDeadlineSeconds": seconds(context.words["time"])}} if context.words["time"] else {}
    tree = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name(context)},
        "spec": {
            **deadline,
            "nprocPerNode": str(cluster.gpus_per_node),
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
                for kind, count in replicas.items()
            },
        },
    }
    return written(context, tree)


def train_job(context: "Context") -> str:
    """The same for Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1): a TrainJob, and the runtime that it is an instance of.

    A TrainJob alone cannot say how long its pods have to end. Raises Refused as above.
    """
    raise_if(objections(context))
    pod, own = spec(context, "node"), name(context)  # as the Trainer calls container and job
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"backoffLimit": 0, "template": {"spec": pod}}
    if context.words["time"]:
        job["activeDeadlineSeconds"] = seconds(context.words["time"])
    api, nodes = "trainer.kubeflow.org/v1alpha1", context.cluster.nodes
    policy: dict[str, Any] = {"numNodes": nodes, "torch": {}}  # processes of a node: 2.2 took them out of here
    jobs = [{"name": "node", "template": {"metadata": {"labels": step}, "spec": job}}]
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": {"name": own, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": jobs}}},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": own}
    instance = {
        "runtimeRef": reference,
        "trainer": {"numNodes": nodes, "numProcPerNode": context.cluster.gpus_per_node},
    }
    return written(
        context, runtime, {"apiVersion": api, "kind": "TrainJob", "metadata": {"name": own}, "spec": instance}
    )


def spec(context: "Context", container: str) -> dict[str, Any]:
    """The pod of a host."""
    lowering, cluster = context.lowering, context.cluster
    script = [f"exec {PROGRAM} run {for_launch(context.overrides)}"]
    if cluster.nodes > 1:
        script = ["set -euo pipefail", f"{PROGRAM} check format=line {for_launch(context.overrides)}"]
        script += [f"python -m nam_megatron.translate {for_translate(context.overrides)} out=/tmp/run"]
        script += [f"export {e.name}={shlex.quote(e.value)}" for e in context.envs if e.value is not None]
        script += [
            'mkdir -p "$TMPDIR"',
            'export NODE_RANK="${PET_NODE_RANK:?}" MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:?}}"',
        ]
        script += ["exec bash /tmp/run/run.sh"]
    volumes, limits = cluster.storage.model_dump(), {"nvidia.com/gpu": cluster.gpus_per_node}
    locked = {}
    if cluster.nodes > 1 and context.words["rdma"] != "none":
        limits[context.words["rdma"]] = 1
        locked = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}  # RDMA locks what it registers
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace(lowering.plan.recipe, parameters(lowering.plan)[0]),
        "containers": [
            {
                "name": container,
                "image": context.words["image"],
                "command": ["bash", "-c", "\n".join(script)],
                "resources": {"limits": limits},
                **locked,
                "volumeMounts": [
                    *({"name": kind, "mountPath": path} for kind, path in volumes.items()),
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            *({"name": kind, "persistentVolumeClaim": {"claimName": kind}} for kind in volumes),
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def name(context: "Context") -> str:
    said = context.lowering.plan.recipe.preset.name.lower()
    return re.sub(r"[^a-z0-9]+", "-", said)[:LONGEST_NAME].strip("-") or "run"


def seconds(time: str) -> int:
    """Of `[D-]HH:MM:SS`."""
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def written(context: "Context", *trees: dict[str, Any]) -> str:
    text = "---\n".join(yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000) for tree in trees)
    return f"# {next(report.header(context.lowering))}\n{text}"


def objections(context: "Context") -> Iterator[Problem]:
    if context.words["image"] is None:
        yield Problem("which container image?", key="image", hint="`image=REGISTRY/NAME:TAG`")
    if context.cluster.nodes > 1 and context.words["trainer"] != "megatron":
        yield Problem("several pods are started with Megatron's trainer", key="trainer", hint="`trainer=megatron`")
    if context.cluster.nodes > 1 and context.words["rdma"] is None:
        hint = "`rdma=rdma/NAME`, as `kubectl describe node` lists it; `rdma=none`: they talk over Ethernet"
        yield Problem("which RDMA resource joins the nodes?", key="rdma", hint=hint)
    said = {key_of(word) for word in context.overrides} if context.cluster.nodes > 1 else set()
    for key in sorted(said & {"hang", "host", "port", "sign"}):
        message = f"several pods are started without `launch run`, and `{key}` would do nothing"
        yield Problem(message, key=key, hint="leave it out")
    for kind, path in context.cluster.storage.model_dump().items():
        if not path.startswith("/"):
            hint = f"name where the claim `{kind}` is mounted: `cluster.storage.{kind}=/{kind}`"
            yield Problem(f"`{path}` is no path in a pod", key=f"cluster.storage.{kind}", hint=hint)


class Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read."""

    def ignore_aliases(self, _: Any) -> bool:
        return True  # master and worker are written out twice

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, Dumper.represent_text)

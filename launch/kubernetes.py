"""Kubernetes: a PyTorchJob (Kubeflow training-operator, kubeflow.org/v1) for a recipe."""

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from launch.slurm import for_launch, for_translate
from nam_megatron import report
from nam_megatron.errors import Problem, raise_if

if TYPE_CHECKING:
    from launch.context import Context

LONGEST_NAME = 50  # characters; the operator appends `-worker-123`


def pytorch_job(context: "Context") -> str:
    """The job as YAML. The image holds this checkout as its working directory and the packages of launch/stack.toml.

    One node runs `launch run`, which leaves a receipt. Several are started by the operator, which tells each which one it is: they are
    checked, each for itself, and leave no receipt.

    Raises Refused where no image is named, or a folder is not.
    """
    raise_if(objections(context))
    lowering, cluster = context.lowering, context.cluster
    script = [f"exec python -m launch run {for_launch(context.overrides)}"]
    if cluster.nodes > 1:
        script = ["set -euo pipefail", f"python -m launch check format=line {for_launch(context.overrides)}"]
        script += [f"python -m nam_megatron.translate {for_translate(context.overrides)} out=/tmp/run"]
        script += [f"export {e.name}={shlex.quote(e.value)}" for e in context.envs if e.value is not None]
        script += ['mkdir -p "$TMPDIR"', 'export NODE_RANK="${PET_NODE_RANK:?}"', "exec bash /tmp/run/run.sh"]
    name = re.sub(r"[^a-z0-9]+", "-", lowering.plan.recipe.preset.name.lower())[:LONGEST_NAME].strip("-") or "run"
    volumes = cluster.storage.model_dump()
    pod = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "pytorch",  # the operator looks for this name
                "image": context.words["image"],
                "command": ["bash", "-c", "\n".join(script)],
                "resources": {"limits": {"nvidia.com/gpu": cluster.gpus_per_node}},
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
    replicas = {"Master": 1, **({"Worker": cluster.nodes - 1} if cluster.nodes > 1 else {})}
    tree = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(cluster.gpus_per_node),
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
                for kind, count in replicas.items()
            },
        },
    }
    return f"# {next(report.header(lowering))}\n" + yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000)


def objections(context: "Context") -> Iterator[Problem]:
    if context.words["image"] is None:
        yield Problem("which container image?", "image", "`image=REGISTRY/NAME:TAG`")
    if context.cluster.nodes > 1 and context.words["trainer"] != "megatron":
        yield Problem("several pods are started with Megatron's trainer", "trainer", "`trainer=megatron`")
    for kind, path in context.cluster.storage.model_dump().items():
        if not path.startswith("/"):
            hint = f"name where the claim `{kind}` is mounted: `cluster.storage.{kind}=/{kind}`"
            yield Problem(f"`{path}` is no path in a pod", f"cluster.storage.{kind}", hint)


class Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read."""

    def ignore_aliases(self, _: Any) -> bool:
        return True  # master and worker are written out twice

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, Dumper.represent_text)

"""The manifests against the schemas that the operators publish, every unknown field an error.

The schemas are not kept here. NAM_CRDS names a folder with, of github.com/kubeflow/trainer, below `manifests/base/crds`,
    kubeflow.org_pytorchjobs.yaml                of release-1.9, the training-operator's last
    trainer.kubeflow.org_trainjobs.yaml          of master
    trainer.kubeflow.org_trainingruntimes.yaml   of master
"""

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.app import checked
from launch.context import Context
from launch.run import kubernetes
from nam_megatron.compile.lower import translate
from nam_megatron.recipe import load

CRDS = os.environ.get("NAM_CRDS")
FILES = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes.yaml",
}
pytestmark = pytest.mark.skipif(
    not CRDS, reason="no schemas of the operators: NAM_CRDS=FOLDER, see the top of this file"
)
STORAGE = [f"cluster.storage.{name}=/{name}" for name in ("durable", "scratch", "receipts")]
WORDS = {
    "format": "kubernetes", "dirty": "refuse", "over_memory": "refuse", "trainer": "megatron", "sanity": None, "port": 29500, "hang": 0,
    "revision": None,
    "lock": None, "diagnostic": None, "sign": None, "host": None, "image": "r/x:1", "time": "1-02:03:04", "rdma": "rdma/ib",
}  # fmt: skip


def context(*words: str) -> Context:
    overrides = ("cluster=h200_2x8", *STORAGE, *words)
    return Context(translate(load("nam56r_fused", overrides)), checked("show", WORDS), overrides, {})


def strict(schema: Any) -> Any:
    """As an API server with `fieldValidation=Strict` reads it: a field that is not described is an error, but where anything may stand."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key not in ("format", "default", "description")}
    if made.pop("x-kubernetes-int-or-string", False):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    fields = made.get("properties")
    anything = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if isinstance(fields, dict) and made.get("type") == "object" and not anything:
        made["additionalProperties"] = False
    return made


def validator(tree: dict[str, Any]) -> jsonschema.Draft202012Validator:
    path = Path(str(CRDS), FILES[tree["kind"]])
    if not path.is_file():
        pytest.skip(f"no `{path}`")
    crd = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    group, _, version = tree["apiVersion"].partition("/")
    assert crd["spec"]["group"] == group and crd["spec"]["names"]["kind"] == tree["kind"]
    (schema,) = [
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == version and v["served"]
    ]
    made = strict(schema)
    made["properties"]["metadata"] = {"type": "object"}  # every object's, which a schema leaves to the server
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize("words", [(), ("cluster=h200_8",)], ids=["two hosts", "one host"])
@pytest.mark.parametrize("form", [kubernetes.pytorch_job, kubernetes.train_job])
def test_a_manifest_is_what_its_operator_describes(form, words):
    trees = list(yaml.safe_load_all(form(context(*words))))
    assert {tree["kind"] for tree in trees} <= FILES.keys()
    for tree in trees:
        assert [f"{error.json_path}: {error.message[:200]}" for error in validator(tree).iter_errors(tree)] == []


@pytest.mark.parametrize("form", [kubernetes.pytorch_job, kubernetes.train_job])
def test_a_field_that_no_operator_knows_is_found(form):
    """So that the test above is one."""
    tree = next(yaml.safe_load_all(form(context())))
    tree["spec"]["nprocPerHost"] = 8
    (error,) = validator(tree).iter_errors(tree)
    assert "nprocPerHost" in error.message

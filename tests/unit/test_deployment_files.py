"""Deployment files: valid for their readers, and in agreement with each other."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from common.config.loading import load_settings

ROOT = Path(__file__).parent.parent.parent
BASE = ROOT / "k8s" / "base"
KUBERNETES = "1.31.0"
ROOMS = {"Router", "Encoder", "Prefill", "Decode"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


SERVE = documents(ROOT / "deploy" / "serve.yaml")[0]
CLUSTER = documents(ROOT / "deploy" / "ray-cluster.yaml")[0]
SERVICE = documents(BASE / "rayservice.yaml")[0]
DEPLOYMENTS = {d["name"]: d for d in SERVE["applications"][0]["deployments"]}
GROUPS = {g["groupName"]: g for g in SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
PODS = {name: group["template"] for name, group in GROUPS.items()} | {
    "head": SERVICE["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
}


def test_cluster_file_is_one_that_ray_up_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(CLUSTER))


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")
def test_application_file_is_one_that_serve_deploy_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    application = ServeDeploySchema.model_validate(SERVE).applications[0]
    assert application.import_path == "services.app:builder"
    assert {d.name for d in application.deployments} == ROOMS


def test_every_room_but_the_router_scales_between_bounds() -> None:
    assert "autoscaling_config" not in DEPLOYMENTS["Router"]
    for room in ROOMS - {"Router"}:
        scaling = DEPLOYMENTS[room]["autoscaling_config"]
        assert 1 <= scaling["min_replicas"] < scaling["max_replicas"]
        assert scaling["downscale_delay_s"] > scaling["upscale_delay_s"]


def test_kubernetes_runs_the_same_application() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


def test_ray_service_has_only_known_fields() -> None:
    schema = json.loads((ROOT / "tests/data/schemas/rayservice.json").read_text())
    jsonschema.validate(SERVICE, schema)
    SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"] = 1
    try:
        with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
            jsonschema.validate(SERVICE, schema)
    finally:
        del SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"]


@pytest.mark.parametrize("name", sorted(PODS))
def test_pod_templates_are_valid_pods(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **PODS[name]}
    pod["metadata"] = {"name": name, **pod["metadata"]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert PODS[name]["metadata"]["labels"] == {"baton/room": name}


@pytest.mark.parametrize("file", ["service", "network-policy", "disruption-budget"])
def test_manifests_of_built_in_kinds_are_valid(file: str) -> None:
    for document in documents(BASE / f"{file}.yaml"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_kustomization_lists_every_manifest_and_existing_settings() -> None:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    manifests = {p.name for p in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == manifests
    for generator in kustomization["configMapGenerator"]:
        for entry in generator["files"]:
            assert (BASE / entry.partition("=")[2]).is_file()


def test_mounted_files_of_the_cluster_exist() -> None:
    for source in CLUSTER["file_mounts"].values():
        assert (ROOT / source).is_file()
    assert SERVE["applications"][0]["args"]["settings"] in CLUSTER["file_mounts"]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_largest_number_of_replicas_fits_the_nodes_of_its_room(room: str) -> None:
    deployment, resource = DEPLOYMENTS[room], room.lower()
    options = deployment["ray_actor_options"]
    scaling = deployment.get("autoscaling_config", {})
    replicas = scaling.get("max_replicas", deployment.get("num_replicas"))
    assert options["resources"] == {resource: 1}
    node = CLUSTER["available_node_types"][resource]
    offered = node["resources"]
    needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), resource: 1}
    a_node = min(offered.get(key, 0) // need for key, need in needs.items() if need)
    assert a_node * node["max_workers"] >= replicas

    group = GROUPS[resource]
    start = group["rayStartParams"]
    assert json.loads(json.loads(start["resources"])) == {resource: 1}
    assert int(start["num-cpus"]) >= options["num_cpus"]
    assert int(start.get("num-gpus", 0)) == options.get("num_gpus", 0)
    assert group["maxReplicas"] >= replicas


def test_settings_of_the_cluster_are_valid_and_fit_the_application() -> None:
    settings = load_settings(ROOT / "deploy" / "settings" / "cluster.toml", environ={})
    for room in ("Router", "Decode"):
        assert DEPLOYMENTS[room]["graceful_shutdown_timeout_s"] > settings.server.drain_s
        grace = GROUPS[room.lower()]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > DEPLOYMENTS[room]["graceful_shutdown_timeout_s"]
    assert settings.router.replicas == DEPLOYMENTS["Router"]["num_replicas"]
    ports = {p["port"] for p in documents(BASE / "service.yaml")[0]["spec"]["ports"]}
    assert ports == {settings.server.port}


def test_every_policy_and_budget_selects_pods_that_exist() -> None:
    labels = [template["metadata"]["labels"] for template in PODS.values()]
    for file in ("network-policy", "disruption-budget"):
        for document in documents(BASE / f"{file}.yaml"):
            selector = document["spec"].get("podSelector") or document["spec"]["selector"]
            wanted = selector.get("matchLabels", {})
            assert any(wanted.items() <= found.items() for found in labels), document["metadata"]

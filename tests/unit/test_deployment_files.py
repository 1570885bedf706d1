"""Deployment files: valid for their readers, and in agreement with each other.

Longer than 300 lines because every kind of file has its own reader.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from common.config.loading import load_settings
from services import app as services_app
from services.scaling_hook import JointPolicy

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


CLUSTERS = ["ray-cluster", "ray-cluster-gcp", "ray-cluster-hosts"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_files_are_ones_that_ray_up_takes(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(documents(ROOT / "deploy" / f"{name}.yaml")[0]))


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_ray_of_a_cluster_demands_the_token_and_tells_figures_each_second(name: str) -> None:
    cluster = documents(ROOT / "deploy" / f"{name}.yaml")[0]
    for kind in ("head", "worker"):
        start = cluster[f"{kind}_start_ray_commands"][-1]
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/etc/baton/ray-token" in start
        assert "METRIC_PUSH_INTERVAL_S=1" in start
    assert cluster["file_mounts"]["/etc/baton/ray-token"] == "~/.ray/auth_token"


def test_clouds_have_the_same_kinds_of_nodes() -> None:
    other = documents(ROOT / "deploy" / "ray-cluster-gcp.yaml")[0]["available_node_types"]
    ours = CLUSTER["available_node_types"]
    assert set(other) == set(ours)
    for name, node in ours.items():
        for key, value in node["resources"].items():
            assert other[name]["resources"][key] >= value


def test_builder_gives_exactly_the_router_and_the_three_rooms() -> None:
    from ray.serve._private.build_app import build_app

    application = services_app.builder({"settings": str(ROOT / "deploy/settings/cluster.toml")})
    built = build_app(application, name="baton")
    assert {d.name for d in built.deployments} == ROOMS
    assert built.ingress_deployment_name == "Router"
    for deployment in built.deployments:
        scaling = deployment._deployment_config.autoscaling_config
        assert (scaling is None) == (deployment.name == "Router")
        if scaling is not None:
            least, most = bounds(deployment.name)
            assert (scaling.min_replicas, scaling.max_replicas) == (least, most)
            # the policy has patience of its own; two would add up
            assert scaling.upscale_delay_s == scaling.downscale_delay_s == 0


def test_the_policy_named_in_the_application_reads_the_same_settings() -> None:
    policy = SERVE["applications"][0]["autoscaling_policy"]
    assert policy["policy_function"] == services_app.POLICY
    assert policy["policy_kwargs"]["settings"] == SERVE["applications"][0]["args"]["settings"]
    joint = JointPolicy(settings=str(ROOT / "deploy/settings/cluster.toml"))
    assert joint({}) == ({}, {})


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")
def test_application_file_is_one_that_serve_deploy_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    application = ServeDeploySchema.model_validate(SERVE).applications[0]
    assert application.import_path == "services.app:builder"
    assert {d.name for d in application.deployments} == ROOMS


def bounds(room: str) -> tuple[int, int]:
    scaling = load_settings(ROOT / "deploy/settings/cluster.toml", environ={}).scaling
    stage = room.lower()
    return getattr(scaling, f"{stage}_min"), getattr(scaling, f"{stage}_max")


def test_numbers_of_replicas_stand_in_the_settings_alone() -> None:
    for room in ROOMS - {"Router"}:
        assert not {"autoscaling_config", "num_replicas"} & set(DEPLOYMENTS[room])


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
        assert source.startswith("~") or (ROOT / source).is_file()
    assert SERVE["applications"][0]["args"]["settings"] in CLUSTER["file_mounts"]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_largest_number_of_replicas_and_an_upgrades_fit_the_nodes_of_its_room(room: str) -> None:
    deployment, resource = DEPLOYMENTS[room], room.lower()
    options = deployment["ray_actor_options"]
    replicas = deployment["num_replicas"] if room == "Router" else bounds(room)[1]
    assert options["resources"] == {resource: 1}
    replicas += math.ceil(deployment["max_surge_percent"] * replicas / 100)
    node = CLUSTER["available_node_types"][resource]
    offered = node["resources"]
    needs = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), resource: 1}
    a_node = min(offered.get(key, 0) // need for key, need in needs.items() if need)
    assert a_node * node["max_workers"] >= replicas

    group = GROUPS[resource]
    start = group["rayStartParams"]
    ((name, a_pod),) = json.loads(json.loads(start["resources"])).items()
    assert name == resource
    assert int(start["num-cpus"]) >= a_pod * options["num_cpus"]
    assert int(start.get("num-gpus", 0)) == a_pod * options.get("num_gpus", 0)
    assert a_pod * group["maxReplicas"] >= replicas


@pytest.mark.parametrize("name", CLUSTERS)
def test_nodes_that_hand_over_have_shared_memory_and_the_network_card(name: str) -> None:
    cluster = documents(ROOT / "deploy" / f"{name}.yaml")[0]
    everywhere = cluster["docker"]["run_options"]
    assert {"--shm-size=16g", "--ulimit=memlock=-1"} <= set(everywhere)
    kinds = cluster.get("available_node_types", {"prefill": {}, "decode": {}})
    for room in ("prefill", "decode"):
        own = kinds[room].get("docker", {}).get("worker_run_options", [])
        assert {"--device=/dev/infiniband", "--cap-add=IPC_LOCK"} <= {*everywhere, *own}
        assert kinds[room].get("resources", {}).get(room, 1) >= 1


def test_pods_live_by_rays_word_and_clients_reach_routers_that_are_ready() -> None:
    for name, template in PODS.items():
        (container,) = template["spec"]["containers"]
        live, ready = (container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness"))
        assert live == {"path": "/api/healthz", "port": 52365}
        assert ready == ({"path": "/ready", "port": "http"} if name == "router" else live)


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


def rendered(folder: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_overlays_give_valid_manifests_and_settings(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(f"k8s/overlays/{overlay}")
    schema = json.loads((ROOT / "tests/data/schemas/rayservice.json").read_text())
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            jsonschema.validate(manifest, schema)
            cluster = manifest["spec"]["rayClusterConfig"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
                pod["metadata"] = {"name": "pod", **pod["metadata"]}
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        elif not manifest["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        assert manifest["metadata"]["namespace"] == "baton"
    (service,) = [m for m in manifests if m["kind"] == "RayService"]
    groups = {g["groupName"]: g for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    (settings,) = [m for m in manifests if m["metadata"]["name"] == "baton-settings"]
    (tmp_path / "settings.toml").write_text(settings["data"]["settings.toml"])
    loaded = load_settings(tmp_path / "settings.toml", environ={})
    assert loaded.server.room_host == "" and loaded.scaling.enabled
    for deployment in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0][
        "deployments"
    ]:
        room = deployment["name"].lower()
        most = deployment.get("num_replicas") or getattr(loaded.scaling, f"{room}_max")
        more = math.ceil(deployment["max_surge_percent"] * most / 100)
        start = groups[room]["rayStartParams"]
        places = json.loads(json.loads(start["resources"]))[room] * groups[room]["maxReplicas"]
        assert places >= most + more, f"an upgrade of {room} finds no place"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_production_asks_every_process_of_ray_for_the_token_and_gives_rdma_to_the_right_rooms() -> (
    None
):
    (service,) = [m for m in rendered("k8s/overlays/production") if m["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "baton-ray-token"
        has_rdma = "rdma/hca" in container["resources"]["limits"]
        assert has_rdma == (group.get("groupName") in ("prefill", "decode"))
        if has_rdma:
            volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
            assert volumes["shm"]["emptyDir"]["sizeLimit"] == "32Gi"
            assert volumes["hugepages"]["emptyDir"]["medium"] == "HugePages-2Mi"


def test_the_image_installs_everything_it_runs_from_what_it_copies(tmp_path: Path) -> None:
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    for _, sources, target in re.findall(
        r"^COPY (?!--from)((.+) (\S+))$", text.split("FROM")[1], re.M
    ):
        for source in sources.split():
            place = tmp_path / "src" / (source if target == "./" else target)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            place.parent.mkdir(exist_ok=True)
            copy(ROOT / source, place)
    (step,) = re.findall(r"^RUN pip (install --no-cache-dir --no-deps .*) \.$", text, re.M)
    command = [sys.executable, "-m", "pip", *step.split(), "--target", tmp_path / "venv", "."]
    subprocess.run(command, cwd=tmp_path / "src", check=True, capture_output=True, timeout=60)
    look = (
        "import services.app, services.cli, services.scaling_hook\n"
        "from router.dashboard import PAGE\n"
        f"assert PAGE.exists() and str(PAGE).startswith({str(tmp_path)!r}), PAGE\n"
    )
    environment = {"PYTHONPATH": str(tmp_path / "venv"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv/bin/baton").exists()


def test_the_image_copies_what_exists_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
    assert {step[0] for step in steps} <= known
    for name, rest in steps:
        if name == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    users = [rest for name, rest in steps if name == "USER"]
    assert users and users[-1] not in ("root", "0")

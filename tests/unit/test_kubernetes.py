# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests: valid by the published schemas, and in step with compose.yaml."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes"
OLDEST = "1.28"
KUSTOMIZE_FILES = {"kustomization.yaml"}

Manifest = dict[str, Any]


def read_documents(path: Path) -> list[Manifest]:
    return [doc for doc in yaml.safe_load_all(path.read_text()) if doc is not None]


def resource_files() -> list[Path]:
    return sorted(path for path in BASE.glob("*.yaml") if path.name not in KUSTOMIZE_FILES)


def resources() -> list[Manifest]:
    return [doc for path in resource_files() for doc in read_documents(path)]


def full_name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def validate(manifest: Manifest, version: str | None = None) -> None:
    kubernetes_validate.validate(
        manifest, version or kubernetes_validate.latest_version(), strict=True
    )


def apply_patch(manifest: Manifest, operations: list[Manifest]) -> Manifest:
    """Given a manifest and JSON patch operations, return a patched copy."""
    patched = copy.deepcopy(manifest)
    for operation in operations:
        *parents, last = operation["path"].strip("/").split("/")
        place: Any = patched
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if operation["op"] == "test":
            assert place[last] == operation["value"]
        elif operation["op"] == "remove":
            del place[last]
        elif operation["op"] == "replace":
            assert last in place
            place[last] = operation["value"]
        else:
            pytest.fail(f"operation not known here: {operation['op']}")
    return patched


@pytest.fixture
def statefulset() -> Manifest:
    (manifest,) = (doc for doc in resources() if doc["kind"] == "StatefulSet")
    return manifest


@pytest.fixture
def pod(statefulset: Manifest) -> Manifest:
    return statefulset["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Manifest) -> Manifest:
    (only,) = pod["containers"]
    return only


@pytest.fixture
def compose() -> Manifest:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["warmhold"]


def test_kustomization_lists_every_resource_file() -> None:
    (kustomization,) = read_documents(BASE / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in resource_files()]


@pytest.mark.parametrize("version", [OLDEST, None], ids=["oldest", "latest"])
@pytest.mark.parametrize("path", resource_files(), ids=lambda path: path.name)
def test_resources_are_valid(path: Path, version: str | None) -> None:
    documents = read_documents(path)
    assert documents
    for document in documents:
        validate(document, version)


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ((), "terminationGracePeriod", 90),
        (("containers", 0), "healthcheck", {}),
        (("containers", 0, "readinessProbe"), "periodSeconds", "five"),
    ],
)
def test_an_invalid_manifest_is_refused(
    statefulset: Manifest, pod: Manifest, place: tuple[str | int, ...], field: str, value: Any
) -> None:
    validate(statefulset)
    spoiled: Any = pod
    for step in place:
        spoiled = spoiled[step]
    spoiled[field] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(statefulset)


def test_rights_equal_those_of_compose(container: Manifest, compose: Manifest) -> None:
    context = container["securityContext"]
    assert context["capabilities"] == {"add": compose["cap_add"]}
    assert compose["security_opt"] == ["seccomp=unconfined"]
    assert context["seccompProfile"] == {"type": "Unconfined"}
    assert "privileged" not in context


def test_pod_is_given_time_to_drain(pod: Manifest, container: Manifest) -> None:
    env = {entry["name"]: entry for entry in container["env"]}
    drain_s = int(env["WARMHOLD_DRAIN_S"]["value"])
    assert pod["terminationGracePeriodSeconds"] == drain_s + 60 > drain_s + 30 > drain_s


def test_liveness_never_asks_for_the_engine(container: Manifest) -> None:
    probe = container["livenessProbe"]
    assert probe["exec"]["command"] == ["warmhold", "healthcheck", "--live"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300


def test_startup_and_readiness_ask_for_the_engine(container: Manifest, compose: Manifest) -> None:
    _, *command = compose["healthcheck"]["test"]
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert startup["exec"]["command"] == readiness["exec"]["command"] == command
    patience_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert f"{patience_s}s" == compose["healthcheck"]["start_period"]


def test_settings_and_mounts_follow_compose(
    statefulset: Manifest, pod: Manifest, container: Manifest, compose: Manifest
) -> None:
    assert {entry["name"] for entry in container["env"]} <= set(compose["environment"])
    wanted = {volume.rpartition(":")[2] for volume in compose["volumes"]}
    wanted |= {mount.partition(":")[0] for mount in compose["tmpfs"]} | {"/dev/shm"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == wanted
    named = {volume["name"] for volume in pod["volumes"]}
    named |= {claim["metadata"]["name"] for claim in statefulset["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == named
    assert all(volume["emptyDir"]["medium"] == "Memory" for volume in pod["volumes"])


def test_no_service_variable_can_pose_as_a_setting(pod: Manifest) -> None:
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False


def test_secrets_are_optional_references(container: Manifest) -> None:
    env = {entry["name"]: entry for entry in container["env"]}
    for name in ("WARMHOLD_API_KEY", "HF_TOKEN"):
        assert "value" not in env[name]
        assert env[name]["valueFrom"]["secretKeyRef"]["optional"] is True


def test_services_select_the_pods(statefulset: Manifest, container: Manifest) -> None:
    spec = statefulset["spec"]
    labels = spec["template"]["metadata"]["labels"]
    services = {
        doc["metadata"]["name"]: doc["spec"] for doc in resources() if doc["kind"] != "StatefulSet"
    }
    assert services[spec["serviceName"]]["clusterIP"] == "None"
    assert services["warmhold"]["type"] == "ClusterIP"
    for service in services.values():
        assert service["selector"] == spec["selector"]["matchLabels"]
        assert service["selector"].items() <= labels.items()
        assert [port["port"] for port in service["ports"]] == [8000]
        assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert container["ports"][0]["containerPort"] == 8000


def test_without_snapshot_takes_the_rights_and_nothing_else(statefulset: Manifest) -> None:
    (component,) = read_documents(BASE / "without-snapshot" / "kustomization.yaml")
    (patch,) = component["patches"]
    assert patch["target"] == {"kind": "StatefulSet", "name": statefulset["metadata"]["name"]}
    patched = apply_patch(statefulset, yaml.safe_load(patch["patch"]))
    validate(patched)
    wanted = copy.deepcopy(statefulset)
    wanted["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {
        "seccompProfile": {"type": "RuntimeDefault"}
    }
    assert patched == wanted


def run_kubectl(*arguments: str) -> str:
    argv = ["kubectl", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("components", [[], ["without-snapshot"]], ids=["base", "component"])
def test_kubectl_builds_it(tmp_path: Path, components: list[str]) -> None:
    if "kustomizeVersion" not in json.loads(run_kubectl("version", "--client", "-o", "json")):
        pytest.skip("this kubectl is older than kustomize components")
    shutil.copytree(BASE, tmp_path / "base")
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["base"],
        "components": [f"base/{name}" for name in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = list(yaml.safe_load_all(run_kubectl("kustomize", str(tmp_path))))
    assert sorted(map(full_name, documents)) == sorted(map(full_name, resources()))
    for document in documents:
        validate(document)
    (built,) = (document for document in documents if document["kind"] == "StatefulSet")
    (container,) = built["spec"]["template"]["spec"]["containers"]
    assert ("capabilities" in container["securityContext"]) is (not components)

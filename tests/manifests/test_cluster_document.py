"""Everything that the documents about clusters name exists."""

import re
import shlex
from typing import Any

import pytest
import yaml

from lathe_base.config.settings import Recipe
from lathe_launch.cluster.janitor import GRACE
from pipelines.compiler.compile import MACHINES
from pipelines.make import MACHINES as VARIABLES
from tests.support.rendered import COMPONENTS, MANIFESTS, ROOT, Object, named

REFERENCE = (ROOT / "docs/reference/cluster.md").read_text()
PAGES = [
    "cluster",
    "tutorials/cluster",
    *(f"how-to/cluster-{name}" for name in ("install", "runs", "nodes", "network", "storage")),
    *("how-to/production", "how-to/tracking", "how-to/troubleshooting"),
    *("reference/cluster", "reference/tested-clusters"),
]
TEXT = "\n".join((ROOT / f"docs/{name}.md").read_text() for name in PAGES)
COMMANDS = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S)).replace("\\\n", " ")
CODE = COMMANDS.split("\n") + re.findall(r"`([^`\n]+)`", TEXT)
FOLDERS = "manifests|images|docs|pipelines|lathe|components|tests"
GENERATED = {"images/refs.json"}


def table(header: str) -> list[list[str]]:
    """Rows of the reference's table that begins with `header`, without its head."""
    rows = REFERENCE[REFERENCE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names(header: str) -> list[str]:
    """Code in the first cells of that table."""
    return [name for first, *_ in table(header) for name in re.findall(r"`([^`]+)`", first)]


def applied(objects: list[Object], kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def test_all_pages_are_checked() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+)\.md\)", (ROOT / "docs/cluster.md").read_text()))
    assert linked == set(PAGES) - {"cluster"}


def test_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named_targets = {m for line in CODE for m in re.findall(r"\bmake ([a-z-]+)", line)}
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
    assert named_targets - targets == set() and len(named_targets) >= 5


def test_files() -> None:
    paths = {m for line in CODE for m in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]+", line)}
    paths = {path for path in paths if path not in GENERATED and path != "lathe/node-pool"}
    paths -= {path for path in paths if re.match(r"lathe/(stage|client|release)\b", path)}
    assert len(paths) >= 8
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    files = names("| file in `manifests/overlays/production/`")
    own = {path.name for path in (MANIFESTS / "overlays" / "production").iterdir()}
    assert set(files) == own


def test_components() -> None:
    assert sorted(names("| component |")) == COMPONENTS


def test_settings() -> None:
    settings = re.findall(r"`([A-Z]\w+)\.([a-z]\w+)(?::[^`]*)?`", TEXT)
    assert len(settings) >= 5
    for group, key in settings:
        assert key in Recipe.model_fields[group].annotation.model_fields, f"{group}.{key}"


def test_objects_that_commands_name_are_applied(production: list[Object]) -> None:
    for kind, plural in (("Deployment", "deployment"), ("Service", "svc"), ("CronJob", "cronjob")):
        found = re.findall(rf"-n lathe [^\n`]*\b{plural}[/ ](lathe-[\w-]+)", TEXT)
        assert found
        for name in found:
            assert named(production, kind, name)


def shapes() -> dict[str, set[str]]:
    """Keys of the example's secrets."""
    found = yaml.safe_load_all((MANIFESTS / "secrets.example.yaml").read_text())
    return {secret["metadata"]["name"]: set(secret["stringData"]) for secret in found}


def test_commands_create_the_secrets_of_the_example() -> None:
    created: dict[str, set[str]] = {}
    for words in (shlex.split(line) for line in COMMANDS.split("\n") if "secret generic" in line):
        name = words[words.index("generic") + 1]
        given = (word for word in words if word.startswith(("--from-file=", "--from-literal=")))
        keys = {word.split("=")[1] for word in given}
        assert created.setdefault(name, keys) == keys, f"pages differ about {name}"
    assert created.pop("registry") == {".dockerconfigjson"}
    only_for_temporary_keys = {"sessiontoken"}
    assert created == {name: keys - only_for_temporary_keys for name, keys in shapes().items()}


def test_the_reference_lists_the_keys_of_the_secrets() -> None:
    rows = {name.strip("`"): keys for name, keys, *_ in table("| Secret |")}
    assert rows.keys() == shapes().keys()
    for name, keys in shapes().items():
        assert keys <= set(re.findall(r"`([\w.-]+)`", rows[name])), name


def test_service_accounts_and_their_permissions(production: list[Object]) -> None:
    rows = {name.strip("`"): rest for name, *rest in table("| account |")}
    accounts = applied(production, "ServiceAccount")
    assert set(rows) == set(accounts) | {"lathe-train", "default-editor"}  # of a component
    roles = applied(production, "Role")
    (cluster_role,) = applied(production, "ClusterRole").values()
    (binding,) = applied(production, "ClusterRoleBinding").values()
    cluster_roles = {subject["name"]: cluster_role for subject in binding["subjects"]}
    for name, (_, in_namespace, in_cluster) in rows.items():
        for role, cell in ((roles.get(name), in_namespace), (cluster_roles.get(name), in_cluster)):
            is_anothers = cell.startswith("those of") and role is None
            assert is_anothers or (role is None) == (cell == "none"), name
            if role:
                assert verbs(role) <= set(re.findall(r"\w+", cell)), name


def verbs(role: dict[str, Any]) -> set[str]:
    return {verb for rule in role["rules"] for verb in rule["verbs"]}


def test_quota_and_default_requests(production: list[Object]) -> None:
    hard = named(production, "ResourceQuota", "lathe")["spec"]["hard"]
    assert {key.strip("`"): value for key, value in table("| quota of")} == hard
    (limit,) = named(production, "LimitRange", "lathe")["spec"]["limits"]
    requests = limit["defaultRequest"]
    assert f"request {requests['cpu']} CPU and {requests['memory']} of memory" in REFERENCE


def test_the_janitors_schedule(production: list[Object]) -> None:
    minutes = GRACE.seconds // 60
    assert f"*/{minutes} " in named(production, "CronJob", "lathe-janitor")["spec"]["schedule"]
    assert f"every {minutes} minutes" in REFERENCE


def test_variables_of_make() -> None:
    variables = {name.partition("=")[0] for name in names("| variable |")}
    assert {*VARIABLES, "NOTIFY"} <= variables
    for option in MACHINES:
        (row,) = [row for row in table("| variable |") if f"`{option.upper()}" in row[0]]
        assert f"`{option}`" in row[1]


@pytest.mark.parametrize("service, ports", [("lathe-serve", {8001, 9000})])
def test_ports(production: list[Object], service: str, ports: set[int]) -> None:
    offered = {p["port"] for p in named(production, "Service", service)["spec"]["ports"]}
    forwarded = {int(m) for m in re.findall(rf"svc/{service} (\d+):\1", COMMANDS)}
    assert forwarded == ports <= offered

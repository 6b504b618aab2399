"""Everything that docs/cluster.md names exists."""

import re
import shlex

import pytest
import yaml

from lathe_base.config.settings import Recipe
from tests.support.rendered import COMPONENTS, MANIFESTS, ROOT, Object, named

TEXT = (ROOT / "docs" / "cluster.md").read_text()
COMMANDS = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S)).replace("\\\n", " ")
CODE = COMMANDS.split("\n") + re.findall(r"`([^`\n]+)`", TEXT)
FOLDERS = "manifests|images|docs|pipelines|lathe|components|tests"
GENERATED = {"images/refs.json"}


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
    table = TEXT[TEXT.index("| file in `manifests/overlays/production/`") :].split("\n\n")[0]
    files = re.findall(r"^\| `([\w.-]+)`", table, re.M)
    own = {path.name for path in (MANIFESTS / "overlays" / "production").iterdir()}
    assert set(files) == own


def test_components() -> None:
    table = TEXT[TEXT.index("| component |") :].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.M)) == COMPONENTS


def test_settings() -> None:
    settings = re.findall(r"`([A-Z]\w+)\.([a-z]\w+)(?::[^`]*)?`", TEXT)
    assert len(settings) >= 5
    for group, key in settings:
        assert key in Recipe.model_fields[group].annotation.model_fields, f"{group}.{key}"


def test_what_commands_name_is_applied(production: list[Object]) -> None:
    for kind, plural in (("Deployment", "deployment"), ("Service", "svc"), ("CronJob", "cronjob")):
        found = re.findall(rf"-n lathe [^\n`]*\b{plural}[/ ](lathe-[\w-]+)", TEXT)
        assert found
        for name in found:
            assert named(production, kind, name)
    shapes = {
        o["metadata"]["name"]: set(o["stringData"]) - {"sessiontoken"}  # only for temporary keys
        for o in yaml.safe_load_all((MANIFESTS / "secrets.example.yaml").read_text())
    }
    made = {
        words[words.index("generic") + 1]: {
            word.split("=")[1]
            for word in words
            if word.startswith(("--from-file=", "--from-literal="))
        }
        for words in (shlex.split(line) for line in COMMANDS.split("\n") if "generic" in line)
    }
    assert made == shapes


@pytest.mark.parametrize("service, ports", [("lathe-serve", {8001, 9000})])
def test_ports(production: list[Object], service: str, ports: set[int]) -> None:
    offered = {p["port"] for p in named(production, "Service", service)["spec"]["ports"]}
    forwarded = {int(m) for m in re.findall(rf"svc/{service} (\d+):\1", COMMANDS)}
    assert forwarded == ports <= offered

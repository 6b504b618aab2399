"""The bill of materials of an environment matches its lock file, package by package."""

import re
from pathlib import Path

import pytest
from packageurl import PackageURL
from packaging.requirements import Requirement

from lathe.report.cards.bom import environment_sbom, read_lock
from lathe_base.errors import Code
from tests.report.cards.test_bom import validated
from tests.support.errors import raises

IMAGES = Path(__file__).parents[3] / "images"
LOCKS = sorted(path.relative_to(IMAGES).as_posix() for path in IMAGES.glob("*/requirements.lock"))


def locked(lock: Path) -> dict[str, tuple[str, set[str]]]:
    """Versions and hashes by name, parsed like pip: continued lines are joined."""
    found = {}
    lines = re.sub(r"\\\n", " ", lock.read_text()).splitlines()
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            pinned, *options = line.split(" --hash=")
            requirement = Requirement(pinned.strip())
            (specifier,) = requirement.specifier
            hashes = {option.strip().removeprefix("sha256:") for option in options}
            found[requirement.name] = specifier.version, hashes
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_it_has_every_package_with_every_hash(name: str) -> None:
    lock = IMAGES / name
    bom = validated(environment_sbom(lock, "an environment"))
    found = {}
    for component in bom["components"]:
        purl = PackageURL.from_string(component["purl"])
        assert (purl.type, purl.name) == ("pypi", component["name"].lower().replace("_", "-"))
        assert purl.version == component["version"]
        hashes = {entry["content"] for entry in component["hashes"]}
        found[component["name"]] = component["version"], hashes
    assert found == locked(lock)


def test_it_says_what_depends_on_what() -> None:
    bom = validated(environment_sbom(IMAGES / "serve" / "requirements.lock", "serve"))
    graph = {
        d["ref"]: {r.split("@")[0] for r in d.get("dependsOn", [])} for d in bom["dependencies"]
    }
    of = {ref.split("@")[0]: wanted for ref, wanted in graph.items()}
    assert "pkg:pypi/markupsafe" in of["pkg:pypi/jinja2"]
    assert {"pkg:pypi/jinja2", "pkg:pypi/nvidia-pytriton"} <= of["environment"]
    assert "pkg:pypi/markupsafe" not in of["environment"]
    wanted = set().union(*of.values())
    assert {
        ref for ref in of if ref.startswith("pkg:")
    } == wanted  # every component is required by another


def test_it_is_the_same_again_and_may_be_an_images(small_lock: Path) -> None:
    lock, digest = small_lock, "d" * 64
    image = f"registry.example.com:5000/team/lathe-paddle:1@sha256:{digest}"
    text = environment_sbom(lock, "paddle", image)
    assert text == environment_sbom(lock, "paddle", image)
    component = validated(text)["metadata"]["component"]
    assert (component["type"], component["version"]) == ("container", f"sha256:{digest}")
    purl = PackageURL.from_string(component["purl"])
    assert (purl.type, purl.name, purl.version) == ("oci", "lathe-paddle", f"sha256:{digest}")
    assert purl.qualifiers == {
        "repository_url": "registry.example.com:5000/team/lathe-paddle",
        "tag": "1",
    }
    plain = validated(environment_sbom(lock, "paddle"))
    assert plain["metadata"]["component"]["type"] == "application"
    assert plain["serialNumber"] != validated(text)["serialNumber"]


@pytest.mark.parametrize(
    ("lock", "code", "text"),
    [
        ("numpy>=1\n", Code.MALFORMED, "a.lock:1: does not pin a package: numpy>=1"),
        ("numpy==2.0\n", Code.INCOMPLETE, "numpy"),
        ("# nothing\n", Code.MALFORMED, "a.lock: "),
        (f"numpy==2.0 \\\n    --hash=sha256:{'a' * 63}\n", Code.MALFORMED, "a.lock:2: "),
        (
            f"a==1 \\\n    --hash=sha256:{'a' * 64}\n-e .\n",
            Code.MALFORMED,
            "a.lock:3: does not pin a package: -e .",
        ),
    ],
)
def test_an_invalid_lock_file_is_rejected(tmp_path: Path, lock: str, code: Code, text: str) -> None:
    (tmp_path / "a.lock").write_text(lock)
    with raises(code, text):
        read_lock(tmp_path / "a.lock")


def test_a_version_of_another_index_is_written_as_the_url_needs_it(small_lock: Path) -> None:
    bom = validated(environment_sbom(small_lock, "small"))
    component = next(c for c in bom["components"] if c["name"] == "markupsafe")
    assert component["purl"] == "pkg:pypi/markupsafe@3.0.4%2Bcpu"
    assert component["version"] == "3.0.4+cpu"


def test_an_image_needs_its_digest(small_lock: Path) -> None:
    with raises(Code.INVALID_VALUE, "lathe-serve:1"):
        environment_sbom(small_lock, "serve", "lathe-serve:1")

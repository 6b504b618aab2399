"""Links are valid: their files and headings exist, and their addresses are complete."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.documents.pages import ROOT, TEXTS, inline, prose
from tests.support.sources import PACKAGES, PIPELINES

LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(
    r"((?:lathe\w*|components|pipelines|tests|docs|images|examples)/[\w./-]+\.py)::(.+)"
)
DOCUMENT = re.compile(r"(?<![\w./-])(docs/[\w/-]+\.md)(?:#([\w-]+))?")
SOURCES = (*PACKAGES, *PIPELINES, "manifests", "examples", "images", "benchmarks")
FOLDERS = r"lathe\w*|components|pipelines|recipes|tests|docs|manifests|examples|benchmarks"


def anchors(text: str) -> set[str]:
    """Anchors that GitHub generates for the headings of a page."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall(prose(TEXTS[page])):
        if "://" in link:
            address = urlsplit(link)
            assert address.scheme == "https" and "." in address.netloc, link
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.is_relative_to(ROOT) and target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


@cache
def linked_from(page: str) -> set[Path]:
    """Files that a page links to."""
    links = [link for link in LINK.findall(TEXTS[page]) if "://" not in link]
    return {((ROOT / page).parent / link.partition("#")[0]).resolve() for link in links}


@pytest.mark.parametrize("page", TEXTS)
def test_every_page_of_docs_is_linked(page: str) -> None:
    if page.startswith("docs/") and page != "docs/README.md":
        assert ROOT / page in linked_from("docs/README.md")


def test_documents_that_code_and_manifests_name_exist() -> None:
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    found = 0
    for path in [ROOT / "Makefile", *paths]:
        if path.suffix not in (".py", ".yaml", ".yml", ""):
            continue
        for name, anchor in DOCUMENT.findall(path.read_text(encoding="utf-8")):
            target = ROOT / name
            assert target.is_file(), f"{path}: no {name}"
            assert name != "docs/cluster.md", f"{path}: name the page that it links to"
            if anchor:
                headings = anchors(target.read_text(encoding="utf-8"))
                assert anchor in headings, f"{path}: {name} has no heading {anchor}"
                found += 1
    assert found >= 8


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_functions_that_are_named_exist(page: str) -> None:
    for code in inline(TEXTS[page]):
        if match := NAMED.fullmatch(code):
            source = (ROOT / match[1]).read_text(encoding="utf-8")
            for name in match[2].split("."):
                pattern = rf"^ *(?:async )?(?:def|class) {name}\b|^ *{name}(?:: [^=\n]+)? = "
                assert re.search(pattern, source, re.M), code
        elif re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", code):
            path = ROOT / code
            assert path.exists() or code in GENERATED or code.startswith(LABELS), code


GENERATED = {"images/refs.json", "examples/run"}
LABELS = ("lathe/node-pool", "lathe/stage", "lathe/client", "lathe/release")
"""Kubernetes labels, which look like paths."""

"""The wheel and the source distribution hold what they should, and work where nothing else is installed."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import zstandard

import headrace
from distribution.installed import link, with_dependencies
from docs.blocks import ROOT, blocks_of

LIMIT_S = 300
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BACKEND = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
BUILD = "import sys; from hatchling.build import *; {}(sys.argv[1])"
HERE = ROOT / "tests" / "distribution"
README = ROOT / "README.md"


def python(*arguments: object, folder: Path, **environment: str) -> str:
    """Run Python and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> None:
    """Leave a source distribution in a folder, and a wheel that was built from that alone."""
    python("-m", "pip", "install", "--quiet", "--target", folder / "backend", *BACKEND, folder=folder)
    path = {"PYTHONPATH": str(folder / "backend")}
    python("-c", BUILD.format("build_sdist"), folder, folder=ROOT, **path)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    python("-c", BUILD.format("build_wheel"), folder, folder=folder / archive.name.removesuffix(".tar.gz"), **path)


@pytest.mark.slow
def test_distributions_are_complete_and_work_with_nothing_else_installed(tmp_path: Path) -> None:
    build(tmp_path)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        check_wheel(wheel)
        wheel.extractall(tmp_path / "wheel")
    check_source(tmp_path)
    (about,) = (tmp_path / "wheel").glob("*.dist-info/METADATA")
    check_metadata(email.message_from_string(about.read_text()))
    uses = use_extras(tmp_path)
    check_quickstart(uses, tmp_path)
    check_extras(uses)


def check_wheel(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = [path for path in (source / "headrace").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert names == {str(path.relative_to(source)) for path in files}
    assert {"headrace/py.typed", "headrace/__init__.py", "headrace/cli/app.py"} <= names
    about = {name.partition(".dist-info/")[2] for name in wheel.namelist()} - {""}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def check_source(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    top = built / archive.name.removesuffix(".tar.gz")
    names = {path.name for path in top.iterdir()}
    assert {"src", "tests", "docs", "examples", "benchmarks", "Makefile", "LICENSE", "constraints.txt"} <= names
    assert not {".venv", ".git", "build", "dist"} & names


def check_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "headrace"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert {*metadata.get_all("Provides-Extra", [])} == PROJECT["optional-dependencies"].keys()
    assert metadata.get_payload() == README.read_text()


def test_python_versions_that_are_claimed_were_run() -> None:
    prefix = "Programming Language :: Python :: "
    claimed = {one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)}
    guide = (ROOT / "docs" / "guide.md").read_text()
    (ran,) = re.findall(r"^\| Python (.*?) \| all tests pass \|$", guide, re.MULTILINE)
    assert claimed == {*re.findall(r"3\.\d+", ran)}
    assert f">={min(claimed, key=lambda text: int(text[2:]))}" == PROJECT["requires-python"]


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {headrace.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


def use_extras(built: Path) -> dict[str, Any]:
    """Return what came of each extra's use, where there is only what the wheel needs, and with what the extra needs."""
    core = with_dependencies(PROJECT["dependencies"])
    link(core, built / "core")
    extras = {}
    for extra in ("cli", "images", "jpeg", "zstd", "ray", "ray-client", "plot"):
        link(with_dependencies(wanted(extra)) - core, built / extra)
        extras[extra] = str(built / extra)
    (block,) = [block for block in blocks_of(README) if block.first_line == "# quickstart.py"]
    compressed = built / "shard.tar.zst"
    pack_numbers(compressed)
    request = {
        "path": [str(built / "wheel"), str(built / "core")],
        "extras": extras,
        "script": block.code,
        "compressed": str(compressed),
    }
    (built / "request.json").write_text(json.dumps(request))
    return json.loads(python("-S", "-E", HERE / "each_extra.py", built / "request.json", folder=built))


def wanted(extra: str) -> list[str]:
    """Return what an extra wants, with what other extras want that it names."""
    found = []
    for text in PROJECT["optional-dependencies"][extra]:
        others = re.fullmatch(r"headrace\[(.*)\]", text)
        found += [one for other in others[1].split(",") for one in wanted(other)] if others else [text]
    return found


def pack_numbers(path: Path) -> None:
    """Write a shard with one sample, compressed."""
    plain = path.with_suffix("")
    with headrace.ShardWriter(f"{plain}.%d") as writer:
        writer.write({"__key__": "0", "cls": 7})
    path.write_bytes(zstandard.compress(Path(f"{plain}.0").read_bytes()))


def check_quickstart(uses: dict[str, Any], built: Path) -> None:
    assert uses["package"] == str(built / "wheel" / "headrace" / "__init__.py")
    (shown,) = [block.code for block in blocks_of(README) if block.first_line == "$ python quickstart.py"]
    assert uses["script"] == re.findall(r"quickstart.py\n(.*?)^\$", shown, re.MULTILINE | re.DOTALL)[0]


def check_extras(uses: dict[str, Any]) -> None:
    found = uses["with"]
    assert "11 samples" in found.pop("cli")
    assert found == {
        "images": "(4, 5, 3)",
        "jpeg": "pillow, simplejpeg",
        "zstd": "[(7,)]",
        "ray": "ray",
        "ray-client": "True",
    }
    for extra, said in uses["without"].items():
        named = "images" if extra == "jpeg" else extra  # without simplejpeg Pillow decodes JPEGs
        assert re.search(rf"pip install ['\"]headrace\[{named}\]['\"]", said), (extra, said)
    assert 'pip install "headrace[demo]"' in uses["demo"]
    without, figure = uses["plot"]
    assert 'pip install "headrace[plot]"' in without
    assert figure == "Figure"

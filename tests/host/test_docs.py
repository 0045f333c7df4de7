"""What the pages promise: the README's commands, documented names, links that lead somewhere."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

import flash4
from flash4 import cli
from tests.source_tree import ROOT, project_files

TEST = "pip install -e '.[dev]' && pytest"
DEMO = "python -m flash4 demo"
PAGES = [path for path in project_files() if path.suffix == ".md"]

# A page or a source speaks of flash4 alone, and works for whoever clones it. A bracket keeps each
# pattern from matching itself.
FOREIGN = [
    r"/wor[k]/",
    r"/tm[p]/(research|venv|bash_jobs)",
    r"/(roo[t]|hom[e]/\w+)/",
    r"\.devic[e]/",
    r"\bsub-?agent[s]?\b",
    r"\b(this|a previous|an earlier|another|the last) sessio[n]\b",
    r"\bdesign\.m[d]\b",
    r"\bknowledg[e]/",
    r"\bspike-(sm|bwd|d)\d+\.m[d]\b",
]


def links(markdown: str) -> list[str]:
    """Targets of relative links; code does not link."""
    prose = re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", markdown, flags=re.S | re.M)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose)
    return [t for t in targets if not re.match(r"[a-z][a-z0-9+.-]*:|#", t)]


def foreign_words(text: str) -> list[str]:
    """What a text says that only its author's machine understands."""
    return [m.group(0) for pattern in FOREIGN for m in re.finditer(pattern, text, re.I)]


def test_readme_names_the_two_commands():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert TEST in lines, ".ci/run takes this line from the README"
    assert any(line.endswith(DEMO) for line in lines)


def test_public_names_are_documented():
    assert flash4.__all__
    bare = [name for name in flash4.__all__ if not inspect.getdoc(getattr(flash4, name))]
    assert not bare, "no docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path):
    targets = [target.partition("#")[0] for target in links(page.read_text("utf-8"))]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_links_are_found():
    page = "[a](x.md#b) ![c](<d.png>)\n[e](https://f.g) [h](#i) `[j](k)`\n```c\n[l](m)\n```\n[n](o)"
    assert links(page) == ["x.md#b", "d.png", "o"]


def test_no_file_speaks_of_its_authors_machine():
    found = []
    for path in project_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # an image or other binary
        found += [f"{path.relative_to(ROOT)}: {word}" for word in foreign_words(text)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        (("see /wor", "k/x"), 1),
        (("/tm", "p/research/x and .devic", "e/run"), 2),
        (("A Sub", "agent wrote it in this sessio", "n"), 2),
        (("the work/ folder, a CUDA session, device/ and tmp/x",), 0),
    ],
)
def test_foreign_words_are_found(parts, count):
    assert len(foreign_words("".join(parts))) == count


def drawing_commands() -> list[tuple[Path, str]]:
    """(page, command) of every picture that a page says how to draw."""
    pattern = r"^python -m flash4 (.* --draw docs/pictures/\S+)$"
    return [(p, c) for p in PAGES for c in re.findall(pattern, p.read_text("utf-8"), re.M)]


@pytest.mark.parametrize(("page", "command"), drawing_commands(), ids=lambda x: str(x)[-60:])
def test_pictures_are_what_their_commands_draw(page, command, tmp_path, capsys):
    """If not: run the command again, and see whether the page still says what the picture shows."""
    words = shlex.split(command)
    kept, again = ROOT / words[-1], tmp_path / "again.svg"
    assert cli.main([*words[:-1], str(again)]) == 0
    (rate,) = re.findall(r"(\d+) TFLOP/s", capsys.readouterr().out)
    assert re.search(rf"\b{rate}\b", page.read_text("utf-8"))
    shown = [re.search("spans [0-9a-f]+", path.read_text("utf-8"))[0] for path in (kept, again)]
    assert shown[0] == shown[1]


def test_every_picture_is_drawn_by_a_command():
    drawn = {shlex.split(command)[-1] for _, command in drawing_commands()}
    assert drawn == {f"docs/pictures/{p.name}" for p in (ROOT / "docs" / "pictures").iterdir()}

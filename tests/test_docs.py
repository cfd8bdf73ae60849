"""The pages on attention say what the code has."""

import re
from pathlib import Path

import pytest

from dit_vca.attention import ATTENTION, VCA_ROWS, option_defaults

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "attention"


def page_of(name: str) -> str:
    return (FOLDER / ("denoising.md" if name.startswith("dna") else f"{name}.md")).read_text()


@pytest.mark.parametrize("name", ATTENTION)
def test_each_attention_has_a_page_with_its_options_and_their_defaults(name):
    page = page_of(name)
    assert f"`{name}`" in page.splitlines()[0] and "**Cost.**" in page and "**When.**" in page
    stated = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", page, re.MULTILINE))
    defaults = {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in option_defaults(name).items()
    }
    if name.startswith("dna"):  # one table for all, beside that of the variants
        stated = {key: value for key, value in stated.items() if key in option_defaults("dna")}
        stated = {key: value for key, value in stated.items() if key in defaults}
    assert stated == defaults


@pytest.mark.parametrize("name", ATTENTION)
def test_the_table_of_all_kinds_links_each_page(name):
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if re.match(rf"\| .*`{name}`", line)]
    assert len(rows) == 1
    (link,) = re.findall(r"\]\((\w+\.md)\)", rows[0])
    assert (FOLDER / link).is_file() and f"`{name}`" in (FOLDER / link).read_text()


def test_every_row_of_the_papers_ablations_is_on_the_page_of_vca():
    assert all(f"`{row}`" in page_of("vca") for row in VCA_ROWS)


def test_links_between_the_pages_lead_somewhere():
    for page in FOLDER.parent.rglob("*.md"):
        for link in re.findall(r"\]\(([\w./-]+\.(?:md|png))\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

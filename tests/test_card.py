"""What a preset's card says has been shown: each line names a file that shows it, and nothing else is called shown."""

import json
from pathlib import Path

import pytest

from nam_megatron import card
from nam_megatron.errors import Refused

REPO = Path(__file__).parent.parent


def test_every_file_that_a_card_names_speaks_of_the_preset():
    for name in dict.fromkeys(map(card.meant, card.presets())):
        shown = {check: found for check, look in card.CHECKS.items() if (found := look(name))}
        assert shown.keys() >= {"verify"}, name
        for check, found in shown.items():
            text = (REPO / found.by).read_text()
            assert name in text or (check == "verify" and "PUBLIC" in text), (name, check, found)


def test_figures_are_the_receipts_own():
    found = card.performance("nam56r_fused")
    run = json.loads((REPO / found.by).read_text())
    window = run["outcome"]["figures"]["window"]
    assert f"{window['median_ms']:,.0f} ms" in found.said and "H200" in found.said
    assert run["recipe"]["model"]["depth"] == 52  # of 13 layers there are faster ones


def test_an_alias_has_the_card_of_its_preset_and_a_wrong_name_none():
    assert "an alias of nam52_h200_dense_ref_v1" in card.text("nam52_h200_moe_no_dsa_ref_v1")
    assert card.text("llama_3_1_8b").count("not shown") >= 3
    with pytest.raises(Refused, match="no preset `nam56r_smok`"):
        card.text("nam56r_smok")
    with pytest.raises(Refused, match="no preset `samba`"):
        card.command(["--config-dir", "../mine", "samba"])


def test_the_page_is_made_from_them():
    assert (REPO / "docs" / "cards.md").read_text() == card.page(), "nam card all > docs/cards.md"
    assert (REPO / "docs" / "cards.json").read_text() == card.facts(), "nam card all format=json > docs/cards.json"

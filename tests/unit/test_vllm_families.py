"""The table of models in docs/vllm.md is what the code says of published configurations."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.vllm_families import FAMILIES, stand_in, table

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN, END = "<!-- models: made by tests/unit/test_vllm_families.py -->", "<!-- end of models -->"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def test_the_table_of_models_is_up_to_date() -> None:
    """Run this file to bring it up to date."""
    page = PAGE.read_text()
    assert page == with_table(page)


def test_layers_that_keep_scratch_are_served_beside_those_that_do_not() -> None:
    (family,) = (each for each in FAMILIES if each.name.startswith("DeepSeek-V4.1"))
    support = family.answer(stand_in(tells=True), True)
    assert support.group_ids == (0,)
    assert support.replayed_tokens == 128


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

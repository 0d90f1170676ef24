"""The table of models is what their configurations say."""

from __future__ import annotations

import models_table


def test_the_table_of_models_is_up_to_date() -> None:
    assert models_table.present() == models_table.table(), (
        "run: python tests/docs/models_table.py --write"
    )

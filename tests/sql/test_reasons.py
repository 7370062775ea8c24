"""Refusal codes: one list in Python, the same in SQL."""

from __future__ import annotations

from controller.placement.reasons import SENTENCES, Code


def test_codes_and_sentences_are_the_same_in_python_and_sql(database):
    with database.connect() as connection:
        rows = dict(connection.execute("select code, sentence from llmgw.reasons").fetchall())
    assert rows == {str(code): sentence for code, sentence in SENTENCES.items()}


def test_every_code_has_a_sentence():
    assert set(SENTENCES) == set(Code)

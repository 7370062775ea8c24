"""The catalog: which models and pools there should be, read from TOML or JSON, checked, applied.

`definition.py` and `profile.py` hold the form, `faults.py` says what is wrong with a document,
`checks.py` compares it with what else is there, `apply.py` writes it. Called by the admin API, on
SIGHUP and by `llmgwctl up`.
"""

"""Measured costs, each a sub-command of ops/bench and a file here. See ops/README.md."""

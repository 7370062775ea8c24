"""A fleet in one process: real agent loops, invented hardware, fake engines. See ops/README.md."""

"""Where replicas go: pure arithmetic on a snapshot. README.md has the theory of operation."""

"""An InfiniBand fabric as a graph, from what `ibnetdiscover` printed. README.md has the theory."""

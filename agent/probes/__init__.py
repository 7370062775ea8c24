"""Discovery of the machine: every probe reads through a `Root`, so any of them can be replayed.

Called by agent/loop.py through agent/probes/inventory.py. A probe never raises past itself and
each field may be unknown (None) on its own: one broken card or a dead filer costs only itself.
"""

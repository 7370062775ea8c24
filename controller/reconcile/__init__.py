"""Brings the fleet towards the catalog: snapshot, pure decision, fenced commit."""

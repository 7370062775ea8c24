"""The controller: routes requests, places replicas, serves the admin API."""

__version__ = "0.1.0"

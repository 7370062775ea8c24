"""The node agent: discovers the machine, runs inference engines, reports to Postgres."""

__version__ = "0.1.0"

"""The admin API: shows and changes the cluster over HTTP, from the SQL views that psql shows.

`routes.py` is the one table of verbs and paths; server, OpenAPI and tests are made from it.
"""

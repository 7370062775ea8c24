"""The client port: an OpenAI-compatible router. `server.run_router` runs one process of it."""

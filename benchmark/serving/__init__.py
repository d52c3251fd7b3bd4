"""Load on an OpenAI-compatible server, and what comes of it; `bench_serving.py` is the command."""

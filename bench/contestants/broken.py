"""A common mistake: the reference with a new gRPC connection for every request."""

from bench.contestants.reference import create_app

app = create_app(is_shared=False)

"""The Triton that comes with Nereid, and the processes of `serve`. Never knows a request."""

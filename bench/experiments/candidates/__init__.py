"""Implementations of the steps of a request, for `bench stages`. Each runs in a separate process, independent of the others."""

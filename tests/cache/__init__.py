"""Tests of `app.cache`."""

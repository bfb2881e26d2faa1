"""Programs of others that call the gateway, each run in an environment of its own against a served gateway."""

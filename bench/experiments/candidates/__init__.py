"""Ways to do the steps of a request, for `bench stages`: each runs in a process of its own. Never know each other."""

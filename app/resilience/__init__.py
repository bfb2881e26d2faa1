"""Admission, deadlines, circuit breakers, retries and shared work. Independent of the kind of work."""

"""The parameters of requests: what each kind of request may have, and how they are parsed."""

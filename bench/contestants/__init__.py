"""The servers that Nereid is compared with, and their shared code. Independent of the harness."""

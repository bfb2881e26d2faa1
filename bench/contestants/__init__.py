"""What Nereid is measured against: each module is one server, run in the environment of requirements/reference.txt.

All take the picture as the body of POST /detect, as the driver sends it to Nereid too: no multipart to take apart.
Their settings are BENCH_TRITON (host:port of gRPC), BENCH_MODEL and BENCH_LABELS.
"""

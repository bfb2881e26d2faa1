"""The tests: a folder for each package of app/, a file for each module, and `system` for the whole."""

import os

# The session's fixtures keep channels open while tests start processes. gRPC's fork handlers then crash about one child in
# eight; without them a child may not use gRPC before it executes another program, which none does. Read when gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
